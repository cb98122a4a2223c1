"""The attention kernels against a dense softmax in float64, under Triton's interpreter as triton_interpreted.py is."""

import itertools
import math

import pytest
import torch
from batchinfer.kernels.paged_attention import gpu
from batchinfer.kernels.paged_attention.variant import Variant


class Case:
    """Random contexts scattered over a cache whose unwritten places hold NaN."""

    def __init__(self, seq_lens, q_heads, kv_heads, head_dim, block_size=16, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.block_size = block_size
        self.q = [torch.randn(n, q_heads, head_dim, generator=generator).to(dtype) for n in seq_lens]
        self.k, self.v = (
            [torch.randn(n, kv_heads, head_dim, generator=generator).to(dtype) for n in seq_lens] for _ in range(2)
        )
        counts = [-(-n // block_size) for n in seq_lens]
        ids = torch.randperm(sum(counts) + 2, generator=generator).tolist()
        self.k_cache, self.v_cache = (
            torch.full((len(ids), kv_heads, block_size, head_dim), math.nan, dtype=dtype) for _ in range(2)
        )
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        for table, k, v in zip(self.tables, self.k, self.v, strict=True):
            for position in range(len(k)):
                block, offset = table[position // block_size], position % block_size
                self.k_cache[block, :, offset], self.v_cache[block, :, offset] = k[position], v[position]

    def run(self, chunks, k_scale=None, v_scale=None, **variant):
        """chunks: (sequence, first position, end) of the queries; the context ends where the chunk does."""
        width = max(len(table) for table in self.tables)
        unused = 1 << 30  # entries beyond a table must not be looked up
        table = torch.tensor([self.tables[s] + [unused] * (width - len(self.tables[s])) for s, _, _ in chunks]).int()
        lengths = [end - start for _, start, end in chunks]
        return gpu.paged_attention(
            torch.cat([self.q[s][start:end] for s, start, end in chunks]),
            self.k_cache,
            self.v_cache,
            table,
            torch.tensor([0, *itertools.accumulate(lengths)]).int(),
            torch.tensor([end for _, _, end in chunks]).int(),
            k_scale,
            v_scale,
            Variant(self.q[0].shape[-1] ** -0.5, **variant),
        ).split(lengths)


def dense(q, k, v, window=None, soft_cap=None, sinks=None):
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
    scores = scores.masked_fill((distance < 0) | (distance >= (window or len(k))), -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


def check(case, chunks, dtype=torch.float32, expected_of=dense, **variant):
    names = {"window" if name == "sliding_window" else name: value for name, value in variant.items()}
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    for (s, start, end), actual in zip(chunks, case.run(chunks, **variant), strict=True):
        expected = expected_of(case.q[s], case.k[s], case.v[s], **names)[start:end]
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


HEADS = [(3, 1), (6, 2), (7, 1), (8, 8), (48, 1)]


@pytest.mark.parametrize(("head_dim", "heads"), [(64, (3, 1)), (96, (6, 2)), (80, (7, 1)), (20, (48, 1))])
def test_equals_dense_softmax(head_dim, heads):
    case = Case([1, 37, 70], *heads, head_dim)
    check(case, [(0, 0, 1), (1, 5, 37), (2, 69, 70)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 160, 256])
@pytest.mark.parametrize("heads", [*HEADS, (1, 1), (64, 1)])
def test_equals_dense_softmax_for_every_shape(dtype, head_dim, heads):
    case = Case([1, 37, 140], *heads, head_dim, dtype=dtype)
    check(case, [(0, 0, 1), (1, 0, 37), (2, 139, 140)], dtype)


@pytest.mark.parametrize("window", [None, 100])
def test_keys_in_several_segments(window):
    """More than two segments of 512 keys, alone and beside a chunk."""
    case = Case([1200, 40], 4, 2, 32)
    check(case, [(0, 1199, 1200)], sliding_window=window)
    check(case, [(1, 0, 40), (0, 1199, 1200)], sliding_window=window)


def test_soft_cap_and_sinks():
    sinks = torch.tensor([0.3, -1.0, 2.0, 5.0])
    case = Case([700, 33], 4, 2, 32)
    for variant in ({"soft_cap": 1.5}, {"sinks": sinks}, {"soft_cap": 0.7, "sinks": sinks, "sliding_window": 30}):
        check(case, [(0, 699, 700), (1, 0, 33)], **variant)


def quantised(case, dtype, generator):
    """Codes and scales in the case's cache; its k and v become what they stand for."""
    codes = [(x.nan_to_num(0).clamp(-3, 3) * 30).to(dtype) for x in (case.k_cache, case.v_cache)]
    scales = [torch.rand(codes[0].shape[:-1], generator=generator) * 0.1 + 1e-4 for _ in range(2)]
    for s, table in enumerate(case.tables):
        n, place = len(case.k[s]), torch.tensor(table)
        case.k[s], case.v[s] = (
            (c[place].float() * x[place][..., None]).transpose(1, 2).flatten(0, 1)[:n]
            for c, x in zip(codes, scales, strict=True)
        )
    case.k_cache, case.v_cache = codes
    return scales


@pytest.mark.parametrize("dtype", [torch.float16])
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_scales_of_tokens_multiply_stored_vectors(dtype, cache_dtype):
    case = Case([600, 50], 6, 2, 64, dtype=dtype)
    k_scale, v_scale = quantised(case, cache_dtype, torch.Generator().manual_seed(1))
    for scale in (k_scale, v_scale):
        scale[case.tables[1][-1], :, 50 % 16 :] = math.nan
    check(case, [(0, 599, 600), (1, 0, 50)], dtype, lambda *x, **_: dense(*x), k_scale=k_scale, v_scale=v_scale)


def test_tiny_scales_of_values_keep_their_precision():
    """1e-6 times a weight is below what a float16 holds well."""
    case = Case([40], 2, 1, 32, dtype=torch.float16)
    k_scale, v_scale = quantised(case, torch.int8, torch.Generator().manual_seed(1))
    expected = dense(case.q[0], case.k[0], case.v[0]) * 1e-6
    actual = case.run([(0, 0, 40)], k_scale=k_scale, v_scale=v_scale * 1e-6)[0].double()
    assert (actual - expected).abs().max() < 6e-8  # half of float16's least number, in which the result is


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(("block_size", "window"), [(16, None), (24, 300)])
def test_offsets_are_part_of_the_keys(cache_dtype, block_size, window):
    """Contexts of one segment and of three, with chunks and single tokens, whose keys are cut in parts as well."""
    case = Case([600, 50], 6, 2, 32, block_size, dtype=torch.float16)
    scales = quantised(case, cache_dtype, torch.Generator().manual_seed(1))
    offset = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(2))
    case.k = [k + offset[torch.arange(len(k)) // 256] for k in case.k]
    options = {"k_scale": scales[0], "v_scale": scales[1], "k_offset": offset, "sliding_window": window}
    for chunks in ([(0, 250, 265), (1, 49, 50)], [(0, 599, 600), (1, 0, 50)]):
        check(case, chunks, torch.float16, lambda q, k, v, **_: dense(q, k, v, window), **options)


def test_offsets_leave_a_row_the_bits_that_it_has_alone_and_in_chunks():
    case = Case([530, 70], 2, 1, 32, dtype=torch.float16)
    scales = quantised(case, torch.int8, torch.Generator().manual_seed(1))
    options = {"k_scale": scales[0], "v_scale": scales[1], "k_offset": torch.randn(3, 1, 32)}
    whole, short = case.run([(0, 240, 530), (1, 0, 70)], **options)
    for start, end in ((240, 300), (500, 530)):
        assert torch.equal(case.run([(0, start, end)], **options)[0], whole[start - 240 : end - 240])
    del case.q[0], case.tables[0]
    alone = case.run([(0, 0, 70)], **options)[0]
    assert torch.equal(alone, short)
    assert torch.equal(alone, case.run([(0, 0, 70)], k_scale=scales[0], v_scale=scales[1])[0])


@pytest.mark.parametrize("size", [1, 2])
def test_static_scales(size):
    case = Case([600, 50], 6, 2, 64)
    quantised(case, torch.float8_e4m3fn, torch.Generator().manual_seed(1))
    static = torch.tensor([0.02, 0.05])[:size]
    by_head = static.expand(2)[:, None]
    case.k, case.v = [], []
    for table, q in zip(case.tables, case.q, strict=True):
        for side, cache in ((case.k, case.k_cache), (case.v, case.v_cache)):
            side.append(cache.float()[torch.tensor(table)].transpose(1, 2).flatten(0, 1)[: len(q)] * by_head)
    chunks = [(0, 599, 600), (1, 0, 50)]
    check(case, chunks, torch.float16, lambda *x, **_: dense(*x), k_scale=static, v_scale=static)


def test_codes_of_nan_stay_nan():
    case = Case([20], 1, 1, 64)
    quantised(case, torch.float8_e4m3fn, torch.Generator().manual_seed(1))
    assert case.run([(0, 19, 20)])[0].isfinite().all()
    case.v_cache.view(torch.uint8)[case.tables[0][0], 0, 3, 5] = 0x7F
    assert case.run([(0, 19, 20)])[0].isnan().sum() == 1


def test_result_is_bitwise_independent_of_chunks_and_batch():
    case = Case([130, 70], 2, 1, 32, dtype=torch.float16)
    k_scale, v_scale = quantised(case, torch.int8, torch.Generator().manual_seed(1))
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    whole = case.run([(0, 0, 130), (1, 0, 70)], **scales)
    for cuts in ([0, 5, 7, 130],):
        for start, end in itertools.pairwise(cuts):
            beside = case.run([(1, 69, 70), (0, start, end), (1, 3, 70)], **scales)
            assert torch.equal(beside[1], whole[0][start:end])
            assert torch.equal(beside[2], whole[1][3:])
    single = case.run([(1, 69, 70)], **scales)[0]
    assert torch.equal(beside[0], single)


def test_nan_stays_in_its_sequence_and_behind_its_cause():
    case = Case([40, 40], 6, 2, 64)
    clean = case.run([(0, 0, 40), (1, 0, 40)])
    case.q[0][30] = math.nan
    outputs = case.run([(0, 0, 40), (1, 0, 40)])
    assert torch.equal(outputs[1], clean[1])
    assert outputs[0][30].isnan().all()
    assert torch.equal(outputs[0][:30], clean[0][:30])


def test_rows_without_keys_are_left_alone():
    """As the filled-up rows of a captured graph are: a length of 0."""
    case = Case([33], 2, 1, 32)
    q, table = torch.randn(2, 2, 32), torch.tensor([case.tables[0], [1 << 30] * 3]).int()
    case.q[0][32] = q[0]
    offsets, lengths = torch.tensor([0, 1, 2]).int(), torch.tensor([33, 0]).int()
    variant = Variant(32**-0.5)
    out = gpu.paged_attention(q, case.k_cache, case.v_cache, table, offsets, lengths, None, None, variant)
    torch.testing.assert_close(out[:1].double(), dense(case.q[0], case.k[0], case.v[0])[32:], rtol=1e-5, atol=1e-5)


def test_segments_take_memory_by_sequence_and_by_the_longest_context(monkeypatch):
    """A chunk of 40 tokens beside one of 1200 keys, which has 3 segments: 2 sequences, not 41 tokens, and 3, not 32."""
    made = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, **options: made.append(tuple(shape)) or empty(shape, **options))
    case = Case([1200, 40], 4, 2, 32)
    case.run([(1, 0, 40), (0, 1199, 1200)])
    assert made == [(41, 4, 32), (2, 4, 3, 32), (2, 4, 3), (2, 4, 3)]


@pytest.mark.parametrize("block", [1023, 1024])
def test_blocks_on_both_sides_of_two_to_the_31_elements(block):
    """One head of 2 values, blocks of 2^20 tokens: block 1024 begins at element 2^31. Only touched pages get memory."""
    cache = torch.zeros(0, dtype=torch.uint8).resize_(1026 << 21).view(torch.float8_e5m2).view(1026, 1, 1 << 20, 2)
    cache[block, 0, 0] = torch.tensor([1.0, 2.0]).to(torch.float8_e5m2)
    table, offsets, lengths = (torch.tensor(x).int() for x in ([[block]], [0, 1], [1]))
    out = gpu.paged_attention(torch.ones(1, 1, 2), cache, cache, table, offsets, lengths, None, None, Variant(1.0))
    assert out.tolist() == [[[1.0, 2.0]]]
