"""Native paged attention against the plain-torch specification: every cache format, bf16 and float32 products, unused
places poisoned with NaN, and bitwise independence of threads, batch and splits of long contexts."""

import ctypes
import math
import subprocess

import pytest
import torch
from batchinfer.kernels.common import native
from batchinfer.kernels.common.fp8 import STORAGE_MAX
from batchinfer.kernels.kv_store import reference as kv_store_reference
from batchinfer.kernels.paged_attention import cpu, paged_attention, reference
from batchinfer.kernels.paged_attention.variant import Variant

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, E4M3, E5M2, torch.int8)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 3e-2}
RAGGED = ([1, 7, 40, 1, 3], [1, 7, 150, 600, 530])  # queries and contexts of five sequences


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_batch(q_lens, seq_lens, q_heads, kv_heads, head_dim, block_size, dtype, cache_dtype):
    """Arguments of paged_attention: blocks in random order, NaN wherever no token stands, q a view of more heads."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-length // block_size) for length in seq_lens]
    order = torch.randperm(sum(counts) + 2, generator=generator).to(torch.int32)
    table = torch.full((len(seq_lens), max(counts)), 2**31 - 1, dtype=torch.int32)
    shape = (sum(counts) + 2, kv_heads, block_size, head_dim)
    caches, scales = [poisoned(shape, cache_dtype) for _ in "kv"], [None, None]
    if cache_dtype.itemsize == 1:
        scales = [torch.full(shape[:-1], math.nan) for _ in "kv"]
    for row, (count, length) in enumerate(zip(counts, seq_lens, strict=True)):
        table[row, :count] = order[sum(counts[:row]) :][:count]
        positions = torch.arange(length)
        slots = table[row, positions // block_size].long() * block_size + positions % block_size
        k, v = (torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype) for _ in "kv")
        kv_store_reference.kv_store(k, v, *caches, slots, *scales)
    offsets = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
    q = torch.randn(sum(q_lens), q_heads + 2, head_dim, generator=generator).to(dtype)[:, 1:-1]
    return q, *caches, table, offsets, torch.tensor(seq_lens, dtype=torch.int32), head_dim**-0.5, *scales


def poisoned(shape, dtype):
    if dtype == torch.int8:
        return torch.full(shape, -100, dtype=dtype)
    if dtype.itemsize == 1:
        return torch.full(shape, 127, dtype=torch.uint8).view(dtype)  # a NaN in both formats
    return torch.full(shape, math.nan, dtype=dtype)


def check(batch, window=None, soft_cap=None, sinks=None, k_offset=None, run=cpu.paged_attention):
    *tensors, scale, k_scale, v_scale = batch
    arguments = (*tensors, k_scale, v_scale, Variant(scale, window, soft_cap, sinks, k_offset))
    result, expected = run(*arguments), reference.paged_attention(*arguments)
    assert result.dtype == batch[0].dtype
    tolerance = TOLERANCE[result.dtype]
    torch.testing.assert_close(result.float(), expected.float(), rtol=tolerance, atol=tolerance)


def test_this_machine_runs_the_native_code():
    assert native.can_run("paged_attention", torch.zeros(1))


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(9, 3, 64), (7, 1, 80), (2, 2, 17)])
def test_formats(cache_dtype, dtype, q_heads, kv_heads, head_dim):
    check(make_batch(*RAGGED, q_heads, kv_heads, head_dim, 16, dtype, cache_dtype))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("heads_per_kv", [1, 3, 6, 7, 8, 48, 64])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
def test_shapes_in_bf16(head_dim, heads_per_kv, cache_dtype):
    check(make_batch([2, 1], [70, 33], heads_per_kv, 1, head_dim, 16, torch.bfloat16, cache_dtype))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3, torch.int8])
@pytest.mark.parametrize(("window", "block_size"), [(1, 16), (37, 5), (64, 64), (513, 1)])
def test_windows_and_block_sizes(cache_dtype, window, block_size):
    check(make_batch(*RAGGED, 6, 2, 64, block_size, torch.bfloat16, cache_dtype), window)


def test_fp16_queries():
    check(make_batch(*RAGGED, 4, 2, 64, 16, torch.float16, torch.float16))


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, E4M3])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 40])
def test_soft_cap_and_sinks(cache_dtype, soft_cap, window):
    sinks = torch.tensor([-3.0, 0.0, 1.0, 5.0, 20.0, -math.inf])
    check(make_batch(*RAGGED, 6, 2, 64, 16, torch.bfloat16, cache_dtype), window, soft_cap, sinks)


@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_static_scales(cache_dtype, dtype):
    *tensors, scale, _, _ = make_batch(*RAGGED, 6, 2, 64, 16, dtype, cache_dtype)
    largest = STORAGE_MAX[cache_dtype]  # of the codes
    check((*tensors, scale, torch.tensor([3.0, 1.0]) / largest, torch.tensor([2.0]) / largest))


SEGMENTS = ([1, 300, 40, 1, 3, 1], [700, 300, 560, 256, 1030, 257])


@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(9, 3, 64), (7, 1, 80), (2, 2, 17), (16, 2, 128)])
def test_offsets_of_keys(cache_dtype, dtype, q_heads, kv_heads, head_dim):
    batch = make_batch(*SEGMENTS, q_heads, kv_heads, head_dim, 16, dtype, cache_dtype)
    check(batch, k_offset=torch.randn(5, kv_heads, head_dim))


@pytest.mark.parametrize("window", [None, 37, 300])
@pytest.mark.parametrize("block_size", [16, 24, 5])
def test_offsets_of_keys_with_windows_and_block_sizes(window, block_size):
    batch = make_batch(*SEGMENTS, 6, 2, 64, block_size, torch.bfloat16, E4M3)
    check(batch, window, k_offset=torch.randn(6, 2, 64))


def test_offsets_leave_a_row_the_bits_that_it_has_alone_in_chunks_and_on_threads():
    q, k, v, table, _, _, *rest = make_batch([600], [600], 6, 2, 64, 16, torch.bfloat16, E4M3)
    offset = torch.randn(3, 2, 64)
    whole = paged_attention(q, k, v, table, torch.tensor([0, 600]), torch.tensor([600]), *rest, k_offset=offset)
    for threads, start, end in ((1, 0, 200), (1, 200, 600), (2, 511, 512), (2, 599, 600), (1, 255, 257), (2, 3, 600)):
        torch.set_num_threads(threads)
        offsets, lens = torch.tensor([0, end - start]), torch.tensor([end])
        part = paged_attention(q[start:end], k, v, table, offsets, lens, *rest, k_offset=offset)
        assert torch.equal(part, whole[start:end])


def test_offset_of_the_first_segment_changes_no_bit_of_what_it_alone_is_in():
    """It adds one number to all scores of a query."""
    q, k, v, table, _, _, *rest = make_batch([256], [256], 6, 2, 64, 16, torch.bfloat16, E4M3)
    batch = (q, k, v, table, torch.tensor([0, 256]), torch.tensor([256]), *rest)
    assert torch.equal(paged_attention(*batch, k_offset=torch.randn(1, 2, 64)), paged_attention(*batch))


@pytest.mark.parametrize("heads_per_kv", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 200])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
def test_decoding_has_the_bits_of_a_prompt(heads_per_kv, head_dim, cache_dtype):
    """A tile of few rows is not laid out, yet its sums are the same."""
    batch = make_batch([300], [300], 2 * heads_per_kv, 2, head_dim, 16, torch.bfloat16, cache_dtype)
    q, k, v, table, offsets, seq_lens, *rest = batch
    whole = paged_attention(*batch)
    for position in (0, 15, 16, 63, 64, 100, 127, 128, 191, 192, 299):
        one = q[position : position + 1]
        offsets, seq_lens = torch.tensor([0, 1]), torch.tensor([position + 1])
        assert torch.equal(paged_attention(one, k, v, table, offsets, seq_lens, *rest)[0], whole[position])


@pytest.mark.parametrize(("dtype", "cache_dtype"), [(torch.bfloat16, E4M3), (torch.float32, torch.float32)])
def test_result_does_not_depend_on_threads_batch_or_split(dtype, cache_dtype):
    """One long context alone is split over the threads; among others, and on one thread, it is not."""
    q, k, v, table, _, seq_lens, *rest = make_batch([1] * 9, [2100] + [300] * 8, 3, 1, 64, 16, dtype, cache_dtype)
    results = []
    for threads, rows in ((1, 1), (2, 1), (4, 1), (1, 9), (2, 9)):
        torch.set_num_threads(threads)
        offsets = torch.arange(rows + 1, dtype=torch.int32)
        results.append(paged_attention(q[:rows], k, v, table[:rows], offsets, seq_lens[:rows], *rest)[0])
    assert all(torch.equal(results[0], result) for result in results[1:])


# Blocks that sequences take over from sequence 0, of 40, and their lengths: none, a part of a chunk, several chunks
# within a span, a span, beyond a span, all but the last token's; the last takes more from sequence 4 than both from 0.
FORKS = [(0, 640), (0, 300), (3, 90), (9, 150), (9, 300), (20, 330), (32, 520), (32, 1100), (39, 631), (40, 641)]
FORKS += [(12, 640)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("cache_dtype", "block_size"), [(torch.bfloat16, 16), (E4M3, 16), (torch.int8, 80)])
@pytest.mark.parametrize(("heads_per_kv", "head_dim"), [(1, 64), (3, 64), (70, 32), (8, 80)])
def test_rows_that_share_keys_have_the_bits_of_each_alone(dtype, cache_dtype, block_size, heads_per_kv, head_dim):
    """Sequences whose tables begin with the same blocks, in a random order among prompts, with sinks and
    a cap or what caches of 8 bits leave out; heads_per_kv = 70 lets a tile hold two sequences only."""
    forks = [(blocks * 16 // block_size, length) for blocks, length in FORKS]
    lens = [length for _, length in forks] + [640, 130]
    q, k, v, table, _, _, *rest = make_batch(
        [1] * len(forks) + [40, 130], lens, 2 * heads_per_kv, 2, head_dim, block_size, dtype, cache_dtype
    )
    for row, (blocks, _) in enumerate(forks):
        table[row, :blocks] = table[0, :blocks]
    table[10, : 300 // block_size] = table[4, : 300 // block_size]
    q_lens = torch.tensor([1] * len(forks) + [40, 130])
    first = torch.cat([torch.zeros(1, dtype=torch.int64), q_lens.cumsum(0)])
    beside = {"k_offset": torch.randn(5, 2, head_dim)} if cache_dtype.itemsize == 1 else {}
    beside |= {} if beside else {"sinks": torch.randn(2 * heads_per_kv), "soft_cap": 9.0}

    def attend(rows):
        queries = torch.cat([q[first[row] : first[row + 1]] for row in rows])
        starts = torch.tensor([0, *q_lens[rows]]).cumsum(0).to(torch.int32)
        seq_lens = torch.tensor(lens, dtype=torch.int32)[rows]
        out = paged_attention(queries, k, v, table[rows], starts, seq_lens, *rest, **beside)
        return out.split(q_lens[rows].tolist())

    rows = torch.randperm(len(lens), generator=torch.Generator().manual_seed(1))
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for row, found in zip(rows.tolist(), attend(rows), strict=True):
            assert not found.isnan().any()
            assert torch.equal(found, attend(torch.tensor([row]))[0])


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
def test_bf16_prompt_is_the_same_in_chunks_of_any_size(cache_dtype):
    q, k, v, table, _, _, *rest = make_batch([600], [600], 6, 2, 64, 16, torch.bfloat16, cache_dtype)
    whole = paged_attention(q, k, v, table, torch.tensor([0, 600]), torch.tensor([600]), *rest)
    for chunk in (1, 97, 256):
        starts = range(0, 600, chunk) if chunk > 1 else (0, 63, 64, 127, 128, 511, 512, 599)
        for start in starts:
            end = min(start + chunk, 600)
            offsets = torch.tensor([0, end - start])
            part = paged_attention(q[start:end], k, v, table, offsets, torch.tensor([end]), *rest)
            assert torch.equal(part, whole[start:end])


def test_nan_key_spoils_its_own_sequence_only():
    q, k, v, table, offsets, seq_lens, *rest = make_batch([1, 1], [90, 90], 3, 1, 64, 16, torch.bfloat16, E4M3)
    clean = paged_attention(q, k, v, table, offsets, seq_lens, *rest)
    k.view(torch.uint8)[table[0, 1], 0, 3] = 0x7F
    spoilt = paged_attention(q, k, v, table, offsets, seq_lens, *rest)
    assert spoilt[0].isnan().all()
    assert torch.equal(spoilt[1], clean[1])


def test_each_code_is_decoded_exactly():
    """A context of one token: the output is the stored value, which bf16 holds exactly."""
    for dtype in (E4M3, E5M2):
        codes = torch.arange(256, dtype=torch.uint8)
        values = codes.view(dtype).float()
        cache = codes.view(4, 1, 1, 64).view(dtype)
        table = torch.arange(4, dtype=torch.int32)[:, None]
        ones = torch.ones(4, dtype=torch.int32)
        q = torch.zeros(4, 1, 64, dtype=torch.bfloat16)
        zero_keys = torch.zeros(4, 1, 1, 64).to(dtype)
        out = paged_attention(q, zero_keys, cache, table, torch.arange(5), ones, 1.0)
        torch.testing.assert_close(out.flatten().float(), values, rtol=0, atol=0, equal_nan=True)


LEVELS = {"": (), "x86-64-v3": ("AVX2", "AVX512"), "x86-64-v4": ("AVX512",)}  # and what the machine must be capable of


@pytest.fixture(
    scope="module", params=["", *(pytest.param(level, marks=pytest.mark.slow) for level in LEVELS if level)]
)
def build_for_others(request, tmp_path_factory):
    """The code for any machine of this architecture or for a level of it, in a process that could use more."""
    level = request.param
    if level and torch.backends.cpu.get_cpu_capability() not in LEVELS[level]:
        pytest.skip(f"this machine has less than {level}")
    output = tmp_path_factory.mktemp("others") / "paged_attention.so"
    source = native.KERNELS / "paged_attention" / "cpu.cpp"
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-fopenmp", *([f"-march={level}"] if level else [])]
    # A namespace of its own: a process has one copy of an inline variable, and builds differ in its size.
    flags.append(f"-Dbatchinfer=build_for_{level.replace('-', '_')}")
    subprocess.run(["c++", *flags, "-o", output, source], check=True)
    entry = ctypes.CDLL(str(output)).paged_attention
    entry.argtypes, entry.restype = (ctypes.POINTER(cpu.Problem),), None
    return entry


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_builds_for_other_machines(build_for_others, monkeypatch, cache_dtype):
    monkeypatch.setattr(cpu, "_run", lambda: build_for_others)
    sinks = torch.linspace(-2, 5, 6)
    for dtype in (torch.float32, torch.bfloat16):
        check(make_batch([1, 9], [40, 90], 6, 2, 80, 16, dtype, cache_dtype), 50)
        check(make_batch([1, 9], [40, 90], 6, 2, 80, 16, dtype, cache_dtype), None, 4.0, sinks)
        if cache_dtype.itemsize == 1:
            batch = make_batch([1, 9], [600, 300], 6, 2, 80, 16, dtype, cache_dtype)
            check(batch, k_offset=torch.linspace(-1, 1, 480).view(3, 2, 80))
