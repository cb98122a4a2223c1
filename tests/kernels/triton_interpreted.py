"""Kernels of the gpu backends against the references under Triton's interpreter, which needs no GPU. Collected by
test_triton_interpreter.py, which runs pytest on this file in a process of its own: the interpreter is chosen when
Triton is imported."""

import math

import pytest
import torch
from batchinfer.kernels.gated_activation import ACTIVATION_KINDS
from batchinfer.kernels.gated_activation import gpu as gated_gpu
from batchinfer.kernels.gated_activation import reference as gated_reference
from batchinfer.kernels.kv_store import gpu as store_gpu
from batchinfer.kernels.kv_store import reference as store_reference
from batchinfer.kernels.layer_norm import gpu as layer_norm_gpu
from batchinfer.kernels.layer_norm import reference as layer_norm_reference
from batchinfer.kernels.quantized_linear import Fp8Weight, IntegerWeight
from batchinfer.kernels.quantized_linear import gpu as linear_gpu
from batchinfer.kernels.quantized_linear.gpu_tiles import splits
from batchinfer.kernels.rms_norm import gpu as norm_gpu
from batchinfer.kernels.rms_norm import reference as norm_reference
from batchinfer.kernels.rotary import gpu as rotary_gpu
from batchinfer.kernels.rotary import reference as rotary_reference

DTYPES = [torch.float32, torch.float16]  # the interpreter's bf16 is wrong
TOLERANCE = {torch.float32: {"rtol": 2e-6, "atol": 2e-6}, torch.float16: {"rtol": 2e-3, "atol": 2e-3}}


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    """Memory that torch.empty gives holds NaN: a place that a kernel leaves out shows."""
    empty = torch.empty

    def poisoned(*shape, **options):
        tensor = empty(*shape, **options)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor.fill_(-1)

    monkeypatch.setattr(torch, "empty", poisoned)


def close(actual, expected):
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, **TOLERANCE[expected.dtype], equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 64), (3, 896), (2, 2, 80), (17, 20), (1, 1, 6000)])
def test_rms_norm(dtype, shape):
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    close(norm_gpu.rms_norm(x, weight, 1e-5), norm_reference.rms_norm(x, weight, 1e-5))
    actual = norm_gpu.add_rms_norm(x, residual, weight, 1e-5)
    expected = norm_reference.add_rms_norm(x, residual, weight, 1e-5)
    close(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


def test_rms_norm_of_heads_within_a_wider_tensor():
    heads, weight = torch.randn(5, 9, 64).half(), torch.randn(64).half()
    q = heads[:, 2:6]
    close(norm_gpu.rms_norm(q, weight, 1e-6), norm_reference.rms_norm(q, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(5, 64), (3, 80), (2, 2, 1000)])
def test_layer_norm(dtype, biased, shape):
    x, residual = torch.randn(shape).to(dtype) + 3, torch.randn(shape).to(dtype)
    weight, bias = (torch.randn(shape[-1]).to(dtype) for _ in range(2))
    arguments = (weight, bias if biased else None, 1e-5)
    close(layer_norm_gpu.layer_norm(x, *arguments), layer_norm_reference.layer_norm(x, *arguments))
    actual = layer_norm_gpu.add_layer_norm(x, residual, *arguments)
    expected = layer_norm_reference.add_layer_norm(x, residual, *arguments)
    close(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


def integer_weight(bits, group, rows, columns, form, permuted):
    groups = -(-columns // group)
    shifts = torch.rand(rows, groups)
    return IntegerWeight(
        bits,
        group,
        torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8),
        torch.rand(rows, groups).half() * 0.1,
        (shifts * 2**bits).round() if form == "zeros" else None,
        (shifts - 0.5).half() if form == "offsets" else None,
        torch.randperm(columns) if permuted else None,
    )


WEIGHTS = [
    (4, 128, 70, 256, "zeros", False),
    (4, 32, 130, 96, "zeros", False),
    (4, 64, 40, 192, "offsets", True),
    (3, 100, 20, 100, "zeros", False),
    (8, 64, 33, 320, "zeros", False),
    (8, 32, 20, 64, "offsets", False),
]


def check_linear(weight, dtype, num_rows, biased):
    x, bias = torch.randn(num_rows, weight.shape[1]).to(dtype), torch.randn(weight.shape[0]) if biased else None
    out = torch.empty(num_rows, weight.shape[0], dtype=dtype)
    packed = linear_gpu.pack_weight(weight)
    assert torch.equal(packed.dequantize(dtype), weight.dequantize(dtype))
    linear_gpu.packed_linear(x, packed, bias, out)
    expected = x.double() @ weight.dequantize(dtype).double().T + (0 if bias is None else bias.double())
    tolerance = 1e-4 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 5, 70])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_packed_linear_of_integers(dtype, num_rows, weight):
    check_linear(integer_weight(*weight), dtype, num_rows, biased=num_rows != 5)


@pytest.mark.parametrize("num_rows", [3, 70])
@pytest.mark.parametrize("block", [(1, 256), (40, 128), (70, 256)])
def test_packed_linear_of_fp8(num_rows, block):
    values = torch.randn(70, 256).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-70 // block[0]), 256 // block[1]) + 0.1
    check_linear(Fp8Weight(values, scales, block), torch.float16, num_rows, biased=True)


def test_packed_linear_cuts_many_inputs_of_few_rows():
    weight = integer_weight(4, 128, 64, 4096, "zeros", False)
    assert splits(64, 2, 4096 // 128) == 8
    check_linear(weight, torch.float16, 2, biased=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
@pytest.mark.parametrize("width", [64, 100, 2500])
def test_gated_activation(dtype, kind, width):
    x = torch.randn(3, 2 * width).to(dtype) * 4
    x[0, :4] = torch.tensor([0.0, 60.0, -60.0, 1e-4])
    actual, expected = gated_gpu.gated_activation(x, kind), gated_reference.gated_activation(x, kind)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype]["rtol"], atol=TOLERANCE[dtype]["atol"] * 10)


ROTATED = [(3, 1, 64, 64), (7, 1, 80, 80), (4, 2, 96, 96), (2, 2, 128, 32), (6, 6, 20, 12)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "rotary_dim"), ROTATED)
def test_rotary(dtype, q_heads, kv_heads, head_dim, rotary_dim):
    heads = torch.randn(4, q_heads + kv_heads, head_dim).to(dtype)
    q, k = heads[:, :q_heads], heads[:, q_heads:]
    table, positions = torch.randn(30, rotary_dim), torch.tensor([29, 0, 7, 7])
    actual = rotary_gpu.rotary(q, k, positions, table)
    for one, expected in zip(actual, rotary_reference.rotary(q, k, positions, table), strict=True):
        close(one, expected)


CACHES = [torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


def cache_of(dtype, scaled, num_blocks=3, kv_heads=2, block_size=4, head_dim=64):
    cache = torch.full((num_blocks, kv_heads, block_size, head_dim), 0.5).to(dtype)
    return cache, torch.full(cache.shape[:-1], -1.0) if scaled else None


def same(actual, expected):
    """Bit by bit, but any NaN equals any other."""
    if actual is not None:
        assert torch.equal(actual.isnan(), expected.isnan()) if actual.is_floating_point() else True
        assert torch.equal(actual.float().nan_to_num(7.0), expected.float().nan_to_num(7.0))


def close_scales(actual, expected):
    """Sums, equal but for their order."""
    if actual is not None:
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0, equal_nan=True)


def stores(dtype):
    return [True] if dtype == torch.int8 else [True, False] if dtype.itemsize == 1 else [False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cache_dtype", "scaled"), [(d, s) for d in CACHES for s in stores(d)])
def test_kv_store(dtype, cache_dtype, scaled):
    """A negative slot writes nothing; beyond the largest code values saturate; NaN stays NaN."""
    k, v = (torch.randn(5, 2, 64).mul(20).to(dtype) for _ in range(2))
    k[0, 0, :6] = torch.tensor([1e4, -1e4, math.nan, math.inf, 0.001, 2e-3])
    v[2, 1] = 0.0
    v[3, 1, 5] = 6e4
    slots = torch.tensor([6, -1, 0, 11, 4])
    caches = [cache_of(cache_dtype, scaled) for _ in range(4)]
    for backend, ((kc, ks), (vc, vs)) in ((store_gpu, caches[:2]), (store_reference, caches[2:])):
        backend.kv_store(k, v, kc, vc, slots, ks, vs)
    for (cache, scale), (expected, expected_scale) in zip(caches[:2], caches[2:], strict=True):
        same(cache, expected)
        close_scales(scale, expected_scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "rotary_dim"), ROTATED)
def test_rotary_kv_store_has_the_bits_of_the_two(dtype, cache_dtype, q_heads, kv_heads, head_dim, rotary_dim):
    """With what the keys have in common taken off, where the cache has scales."""
    q, k, v = (torch.randn(4, heads, head_dim).to(dtype) for heads in (q_heads, kv_heads, kv_heads))
    table, positions, slots = torch.randn(30, rotary_dim), torch.tensor([29, 0, 7, 7]), torch.tensor([3, 0, -1, 9])
    scaled = cache_dtype.itemsize == 1
    fused, apart = (
        [cache_of(cache_dtype, scaled, kv_heads=kv_heads, head_dim=head_dim) for _ in range(2)] for _ in range(2)
    )
    (kc, ks), (vc, vs) = fused
    offset, weight = (torch.rand(3, kv_heads, head_dim) if scaled else None for _ in range(2))
    known = (offset, weight, torch.tensor([767, 255, 0, 256]))
    rotated = store_gpu.rotary_kv_store(q, k, v, positions, table, kc, vc, slots, ks, vs, *known)
    expected_q, expected_k = rotary_gpu.rotary(q, k, positions, table)
    if offset is not None:
        expected_k = expected_k.float() - offset[[2, 0, 0, 1]]
        weight = weight[[2, 0, 0, 1]]
    (kc, ks), (vc, vs) = apart
    store_reference.kv_store(expected_k, v, kc, vc, slots, ks, vs, weight)
    assert torch.equal(rotated, expected_q)
    for (cache, scale), (expected, expected_scale) in zip(fused, apart, strict=True):
        same(cache, expected)
        close_scales(scale, expected_scale)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2), (1, 1)])
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_kv_store_by_static_scales(cache_dtype, sizes):
    k, v = (torch.randn(3, 2, 64).mul(20).half() for _ in range(2))
    scales = [torch.tensor([0.05, 0.7])[:size] for size in sizes]
    caches = [cache_of(cache_dtype, False)[0] for _ in range(4)]
    for backend, (kc, vc) in ((store_gpu, caches[:2]), (store_reference, caches[2:])):
        backend.kv_store(k, v, kc, vc, torch.tensor([6, -1, 0]), *scales)
    for cache, expected in zip(caches[:2], caches[2:], strict=True):
        same(cache, expected)


@pytest.mark.parametrize("code", ["e4m3", "e5m2"])
def test_every_float16_encodes_as_torch_does(code):
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[code]
    halves = torch.arange(65536).to(torch.int32).to(torch.uint16).view(torch.float16).view(-1, 64, 64)
    neighbours = torch.nextafter(halves.float(), torch.tensor(math.inf))
    for values in (halves.float(), neighbours):
        cache, expected = (torch.zeros(1, 64, len(values), 64).to(dtype) for _ in range(2))
        store_gpu.kv_store(values, values, cache, cache, torch.arange(len(values)), None, None)
        store_reference.kv_store(values, values, expected, expected, torch.arange(len(values)), None, None)
        same(cache, expected)


def test_slots_beyond_two_to_the_31_elements():
    """Blocks of 2^20 tokens of 2 bytes: block 1024 begins at element 2^31. Only touched pages get memory."""
    cache = torch.zeros(0)  # the poisoned torch.empty would touch each page
    cache = cache.new_zeros(0, dtype=torch.uint8).resize_(1026 << 21).view(torch.float8_e5m2).view(1026, 1, 1 << 20, 2)
    k = torch.tensor([1.0, -2.0]).view(1, 1, 2)
    store_gpu.kv_store(k, k, cache, cache, torch.tensor([(1024 << 20) + 5]), None, None)
    assert cache[1024, 0, 5].float().tolist() == [1.0, -2.0]
