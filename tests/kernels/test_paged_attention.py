"""paged_attention against a naive softmax in float64, and the independence of a token's result from everything that is
not its own sequence."""

import itertools
import math

import pytest
import torch
from batchinfer.kernels.paged_attention import paged_attention


@pytest.fixture(autouse=True, params=["reference", "as dispatched"])
def _one_thread(request, monkeypatch):
    """The specification itself is tested also where a native backend stands before it."""
    if request.param == "reference":
        monkeypatch.setattr("batchinfer.kernels.paged_attention.cpu.can_run", lambda *tensors: False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Case:
    """Random contexts scattered over a cache whose unwritten places hold NaN."""

    def __init__(self, seq_lens, q_heads, kv_heads, head_dim, block_size=16, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.block_size = block_size
        self.seq_lens = seq_lens
        self.q = [torch.randn(n, q_heads, head_dim, generator=generator).to(dtype) for n in seq_lens]
        self.k = [torch.randn(n, kv_heads, head_dim, generator=generator).to(dtype) for n in seq_lens]
        self.v = [torch.randn(n, kv_heads, head_dim, generator=generator).to(dtype) for n in seq_lens]
        counts = [-(-n // block_size) for n in seq_lens]
        ids = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        shape = (len(ids), kv_heads, block_size, head_dim)
        self.k_cache = torch.full(shape, math.nan, dtype=dtype)
        self.v_cache = torch.full(shape, math.nan, dtype=dtype)
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        for table, k, v in zip(self.tables, self.k, self.v, strict=True):
            for position in range(len(k)):
                block, offset = table[position // block_size], position % block_size
                self.k_cache[block, :, offset] = k[position]
                self.v_cache[block, :, offset] = v[position]

    def run(self, chunks, **options):
        """chunks: (sequence, first position, end) of the queries; the context ends where the chunk does."""
        width = max(len(table) for table in self.tables)
        unused = 1 << 30  # entries beyond a table must not be looked up
        table = torch.tensor([self.tables[s] + [unused] * (width - len(self.tables[s])) for s, _, _ in chunks])
        lengths = [end - start for _, start, end in chunks]
        return paged_attention(
            torch.cat([self.q[s][start:end] for s, start, end in chunks]),
            self.k_cache,
            self.v_cache,
            table.int(),
            torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]).int(),
            torch.tensor([end for _, _, end in chunks]).int(),
            self.q[0].shape[-1] ** -0.5,
            **options,
        ).split(lengths)

    def whole(self):
        return [(s, 0, n) for s, n in enumerate(self.seq_lens)]


def naive(q, k, v, window=None, soft_cap=None, sinks=None):
    """Each query and head by itself in float64: the sum of the visible values over the sum of their exponentials."""
    q, k, v = q.double(), k.double(), v.double()
    heads_per_kv = q.shape[1] // k.shape[1]
    result = torch.empty_like(q)
    for position in range(len(q)):
        seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
        for head in range(q.shape[1]):
            keys, values = (x[seen, head // heads_per_kv] for x in (k, v))
            scores = (keys @ q[position, head]) / math.sqrt(q.shape[-1])
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            weights = torch.exp(scores)
            sink = 0.0 if sinks is None else math.exp(sinks[head].item())
            result[position, head] = (weights @ values) / (weights.sum() + sink)
    return result


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 160, 192, 256, 20, 17])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(3, 1), (6, 2), (7, 1), (8, 8), (33, 1), (48, 1), (64, 1)])
def test_equals_naive_softmax(head_dim, q_heads, kv_heads):
    """Head dimensions and numbers of query heads a KV head that are no powers of two among them."""
    case = Case([1, 9, 140], q_heads, kv_heads, head_dim)
    outputs = case.run([(0, 0, 1), (1, 0, 9), (2, 139, 140)])
    for (s, start), output in zip([(0, 0), (1, 0), (2, 139)], outputs, strict=True):
        expected = naive(case.q[s], case.k[s], case.v[s])[start:]
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 7, 128, 129, 200, 1000])
def test_sliding_window(window):
    case = Case([300, 150], 6, 2, 32)
    outputs = case.run([(0, 0, 300), (1, 149, 150)], sliding_window=window)
    torch.testing.assert_close(
        outputs[0].double(), naive(case.q[0], case.k[0], case.v[0], window), rtol=1e-5, atol=1e-5
    )
    last = naive(case.q[1], case.k[1], case.v[1], window)[149:]
    torch.testing.assert_close(outputs[1].double(), last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("soft_cap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("window", [None, 20])
def test_soft_cap(soft_cap, window):
    case = Case([70, 33], 6, 2, 32)
    case.q = [3 * q for q in case.q]  # scores up to 10 or so: the smaller caps flatten them
    outputs = case.run([(0, 0, 70), (1, 32, 33)], soft_cap=soft_cap, sliding_window=window)
    whole, last = (naive(case.q[s], case.k[s], case.v[s], window, soft_cap) for s in range(2))
    torch.testing.assert_close(outputs[0].double(), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outputs[1].double(), last[32:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_sinks(window, soft_cap):
    case = Case([70, 33, 1], 6, 2, 32)
    sinks = torch.tensor([-100.0, -1.0, 0.0, 2.0, 8.0, 40.0])  # from no weight to nearly all of it
    options = {"sliding_window": window, "soft_cap": soft_cap, "sinks": sinks}
    outputs = case.run([(0, 0, 70), (1, 32, 33), (2, 0, 1)], **options)
    for s, (first, output) in enumerate(zip((0, 32, 0), outputs, strict=True)):
        expected = naive(case.q[s], case.k[s], case.v[s], window, soft_cap, sinks)[first:]
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_sink_takes_half_the_weight_of_one_equal_key():
    keys, values = torch.zeros(1, 1, 16, 8), torch.full((1, 1, 16, 8), 3.0)
    table, offsets, lens = torch.zeros(1, 1).int(), torch.tensor([0, 1]).int(), torch.tensor([1]).int()
    output = paged_attention(torch.ones(1, 1, 8), keys, values, table, offsets, lens, 1.0, sinks=torch.zeros(1))
    assert output.unique().tolist() == [1.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_caches(dtype):
    case = Case([70, 33], 7, 1, 80, dtype=dtype)
    outputs = case.run([(0, 0, 70), (1, 32, 33)])
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for s, first in ((0, 0), (1, 32)):
        expected = naive(case.q[s], case.k[s], case.v[s])[first:]
        torch.testing.assert_close(outputs[s].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(9, 3, 64), (7, 1, 80), (4, 4, 128)])
def test_result_is_bitwise_independent_of_chunks_and_batch(dtype, q_heads, kv_heads, head_dim):
    lengths = [300, 70, 129, 1, 17]
    case = Case(lengths, q_heads, kv_heads, head_dim, dtype=dtype)
    whole = case.run(case.whole())
    for s, n in enumerate(lengths):
        assert torch.equal(case.run([(s, 0, n)])[0], whole[s])
    for cuts in ([0, 5, 6, 100, 300], [0, 128, 299, 300], [0, 1, 300]):
        for start, end in itertools.pairwise(cuts):
            beside = case.run([(1, 69, 70), (0, start, end), (2, 40, 129)])
            assert torch.equal(beside[1], whole[0][start:end])
            assert torch.equal(beside[0], whole[1][69:])
    decode = case.run([(s, n - 1, n) for s, n in enumerate(lengths)])
    assert all(torch.equal(one, all_[-1:]) for one, all_ in zip(decode, whole, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
def test_result_is_bitwise_independent_of_the_batch_size(threads):
    torch.set_num_threads(threads)
    lengths = [50 + 3 * i % 250 for i in range(200)]
    case = Case(lengths, 9, 3, 64, dtype=torch.bfloat16)
    chunks = [(s, n - 1, n) for s, n in enumerate(lengths)]
    together = case.run(chunks)
    for s in (0, 17, 99, 199):
        assert torch.equal(case.run([chunks[s]])[0], together[s])


def test_result_is_bitwise_independent_of_the_block_size():
    results = [Case([150, 20], 6, 2, 64, block_size=size).run([(0, 0, 150), (1, 19, 20)]) for size in (16, 1, 24, 256)]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("block_size", [16, 24])
def test_blocks_may_lie_apart(block_size):
    """As where the blocks of other layers stand between them."""
    case = Case([150, 20], 6, 2, 64, block_size=block_size)
    together = case.run(case.whole())
    memory = torch.full((case.k_cache.shape[0], 5, *case.k_cache.shape[1:]), math.nan)
    memory[:, 1], memory[:, 3] = case.k_cache, case.v_cache
    case.k_cache, case.v_cache = memory[:, 1], memory[:, 3]
    assert all(torch.equal(a, b) for a, b in zip(case.run(case.whole()), together, strict=True))


def test_nan_stays_in_its_sequence_and_behind_its_cause():
    case = Case([40, 40], 6, 2, 64)
    clean = case.run(case.whole())
    case.q[0][30] = math.nan
    outputs = case.run(case.whole())
    assert torch.equal(outputs[1], clean[1])
    assert outputs[0][30].isnan().all()
    assert torch.equal(outputs[0][:30], clean[0][:30])
    table, offset = case.tables[0][20 // 16], 20 % 16
    case.v_cache[table, 0, offset] = math.nan
    case.k_cache[table, 1, offset] = math.nan
    outputs = case.run([(1, 39, 40), (0, 39, 40)])
    assert torch.equal(outputs[0], clean[1][39:])
    assert outputs[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_scales_multiply_stored_vectors(dtype):
    case = Case([150], 6, 2, 64)
    codes_k, codes_v = ((x.clamp(-3, 3).nan_to_num(0) * 30).to(dtype) for x in (case.k_cache, case.v_cache))
    generator = torch.Generator().manual_seed(1)
    k_scale, v_scale = (torch.rand(codes_k.shape[:-1], generator=generator) * 0.1 for _ in range(2))
    case.k_cache, case.v_cache = codes_k.float() * k_scale[..., None], codes_v.float() * v_scale[..., None]
    expected = case.run([(0, 0, 150)])[0]
    case.k_cache, case.v_cache = codes_k, codes_v
    stale = case.tables[0][-1]
    k_scale[stale, :, 150 % 16 :] = math.nan
    v_scale[stale, :, 150 % 16 :] = math.nan
    actual = case.run([(0, 0, 150)], k_scale=k_scale, v_scale=v_scale)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize(("block_size", "window"), [(16, None), (24, None), (16, 100)])
def test_offsets_are_part_of_the_keys(dtype, block_size, window):
    """Over three segments of 256 positions, of which blocks of 24 straddle the borders."""
    case = Case([600, 40], 6, 2, 32, block_size)
    codes = [(x.clamp(-3, 3).nan_to_num(0) * 30).to(dtype) for x in (case.k_cache, case.v_cache)]
    generator = torch.Generator().manual_seed(1)
    scales = [torch.rand(codes[0].shape[:-1], generator=generator) * 0.1 for _ in "kv"]
    offset = torch.randn(3, 2, 32, generator=generator) * 2
    for s, (table, n) in enumerate(zip(case.tables, case.seq_lens, strict=True)):
        k, v = (
            (c[table].float() * scale[table][..., None]).transpose(1, 2).flatten(0, 1)[:n]
            for c, scale in zip(codes, scales, strict=True)
        )
        case.k[s], case.v[s] = k + offset[torch.arange(n) // 256], v
    case.k_cache, case.v_cache = codes
    options = {"k_scale": scales[0], "v_scale": scales[1], "k_offset": offset, "sliding_window": window}
    whole, last = case.run([(0, 0, 600), (1, 39, 40)], **options)
    expected = [naive(q, k, v, window) for q, k, v in zip(case.q, case.k, case.v, strict=True)]
    torch.testing.assert_close(whole.double(), expected[0], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(last.double(), expected[1][39:], rtol=2e-5, atol=2e-5)
    single = case.run([(0, 599, 600)], **options)[0]
    torch.testing.assert_close(single.double(), expected[0][599:], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("num_scales", [1, 2])
def test_static_scales(dtype, num_scales):
    case = Case([70, 33], 6, 2, 64)
    codes_k, codes_v = ((x.clamp(-3, 3).nan_to_num(0) * 30).to(dtype) for x in (case.k_cache, case.v_cache))
    k_scale, v_scale = torch.tensor([0.02, 0.05])[:num_scales], torch.tensor([0.5, 0.01])[:num_scales]
    for table, k, v in zip(case.tables, case.k, case.v, strict=True):  # the values that the codes stand for
        for position in range(len(k)):
            block, offset = table[position // 16], position % 16
            k[position] = codes_k[block, :, offset].float() * k_scale[:, None]
            v[position] = codes_v[block, :, offset].float() * v_scale[:, None]
    case.k_cache, case.v_cache = codes_k, codes_v
    outputs = case.run([(0, 0, 70), (1, 32, 33)], k_scale=k_scale, v_scale=v_scale)
    for s, first in ((0, 0), (1, 32)):
        expected = naive(case.q[s], case.k[s], case.v[s])[first:]
        torch.testing.assert_close(outputs[s].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [None, torch.ones(1)])
def test_fp8_without_a_scale_a_token_keeps_nan_codes(scale):
    case = Case([20], 1, 1, 64)
    case.k_cache = case.k_cache.nan_to_num(0).to(torch.float8_e4m3fn)
    case.v_cache = case.v_cache.nan_to_num(0).to(torch.float8_e4m3fn)
    scales = {"k_scale": scale, "v_scale": scale}
    assert case.run([(0, 19, 20)], **scales)[0].isfinite().all()
    case.v_cache.view(torch.uint8)[case.tables[0][0], 0, 3, 5] = 0x7F
    assert case.run([(0, 19, 20)], **scales)[0].isnan().sum() == 1


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("block_size", [16, 5])
def test_block_ids_that_straddle_two_to_the_31_elements(block_size, scaled):
    """Blocks on both sides of element 2^31, and of 2^31 scales. Only pages that are touched get memory."""
    head_dim, dtype = (1, torch.float8_e5m2) if scaled else (64, torch.float8_e5m2)
    border = (1 << 31) // (block_size * head_dim)
    shape = (border + 3, 1, block_size, head_dim)
    k_cache, v_cache = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
    scales = [torch.empty(shape[:-1]) if scaled else None for _ in "kv"]
    table = torch.tensor([[border - 1, border, border + 1, 0, border + 2]]).int()
    length = 4 * block_size + 1
    values = torch.arange(1, length + 1) % 7 + 1.0  # e5m2 holds 1 to 8 exactly
    for position in range(length):
        block, offset = int(table[0, position // block_size]), position % block_size
        k_cache[block, 0, offset] = torch.zeros(head_dim).to(dtype)
        v_cache[block, 0, offset] = values[position].expand(head_dim).to(dtype)
        for scale in scales:
            if scale is not None:
                scale[block, 0, offset] = 2.0
    lens = torch.tensor([length]).int()
    q = torch.ones(1, 1, head_dim)
    output = paged_attention(q, k_cache, v_cache, table, torch.tensor([0, 1]).int(), lens, 1.0, *scales)
    expected = values.mean().item() * (2 if scaled else 1)
    assert output.flatten().tolist() == pytest.approx([expected] * head_dim, rel=1e-5)


EIGHT_BITS = {name: torch.zeros(2, 2, 16, 8, dtype=torch.int8) for name in ("k_cache", "v_cache")}
SCALED = EIGHT_BITS | {"k_scale": torch.zeros(2, 2, 16), "v_scale": torch.zeros(2, 2, 16)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 0}, "sliding_window = 0"),
        ({"soft_cap": 0.0}, "soft_cap = 0.0"),
        ({"sinks": torch.zeros(3)}, "sinks"),
        ({"sinks": torch.zeros(4).half()}, "sinks"),
        ({"k_scale": torch.zeros(2), "v_scale": torch.zeros(2)}, "takes no scales"),
        ({**EIGHT_BITS, "k_scale": torch.zeros(3), "v_scale": torch.zeros(3)}, "do not fit the cache"),
        ({**EIGHT_BITS, "k_scale": torch.zeros(1).half(), "v_scale": torch.zeros(1)}, "do not fit the cache"),
        ({**EIGHT_BITS, "k_scale": torch.zeros(1)}, "of one kind"),
        ({**EIGHT_BITS, "k_scale": torch.zeros(2, 2, 16), "v_scale": torch.zeros(2)}, "of one kind"),
        (EIGHT_BITS, "an int8 cache needs scales"),
        ({"k_offset": torch.zeros(1, 2, 8)}, "k_offset needs a cache with a scale"),
        ({**SCALED, "k_offset": torch.zeros(1, 2, 9)}, r"k_offset torch.float32 \(1, 2, 9\)"),
        ({**SCALED, "k_offset": torch.zeros(0, 2, 8)}, "k_offset covers 0 of 16 positions"),
        ({**SCALED, "k_offset": torch.zeros(1, 2, 8), "soft_cap": 3.0}, "k_offset goes with neither"),
        ({**SCALED, "k_offset": torch.zeros(1, 2, 8), "sinks": torch.zeros(4)}, "k_offset goes with neither"),
        ({"v_cache": torch.zeros(2, 2, 16, 8).bfloat16()}, "one shape and dtype"),
        ({"v_cache": torch.zeros(2, 3, 2, 16, 8)[:, 0]}, "equally far apart"),
        ({name: torch.zeros(2, 2, 8, 16).mT for name in ("k_cache", "v_cache")}, "must be contiguous"),
        ({"q": torch.zeros(1, 3, 8)}, r"queries \(1, 3, 8\)"),
        ({"seq_lens": torch.zeros(2).int()}, "2 lengths"),
    ],
)
def test_refuses_what_does_not_fit(change, message):
    cache = torch.zeros(2, 2, 16, 8)
    arguments = {
        "q": torch.zeros(1, 4, 8),
        "k_cache": cache,
        "v_cache": cache,
        "block_table": torch.zeros(1, 1).int(),
        "cu_seqlens_q": torch.tensor([0, 1]).int(),
        "seq_lens": torch.ones(1).int(),
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        paged_attention(**(arguments | change))
