"""The native elementwise operations against the plain-torch specification, and their bits where rounding allows it."""

import math

import pytest
import torch
from batchinfer.kernels.common import native
from batchinfer.kernels.gated_activation import cpu as gated_cpu
from batchinfer.kernels.gated_activation import reference as gated_reference
from batchinfer.kernels.kv_store import cpu as store_cpu
from batchinfer.kernels.kv_store import reference as store_reference
from batchinfer.kernels.kv_store import rotary_kv_store
from batchinfer.kernels.layer_norm import cpu as layer_norm_cpu
from batchinfer.kernels.layer_norm import reference as layer_norm_reference
from batchinfer.kernels.rms_norm import cpu as norm_cpu
from batchinfer.kernels.rms_norm import reference as norm_reference
from batchinfer.kernels.rotary import cpu as rotary_cpu
from batchinfer.kernels.rotary import reference as rotary_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CACHE_DTYPES = (*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
ULPS = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _seeded_on_two_threads():
    before = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def close(result, expected):
    assert result.dtype == expected.dtype
    limit = ULPS[expected.dtype]
    torch.testing.assert_close(result.float(), expected.float(), rtol=limit, atol=limit, equal_nan=True)


@pytest.mark.parametrize("operation", native.OPERATIONS)
def test_this_machine_runs_them(operation):
    assert native.can_run(operation, torch.zeros(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 7), (300, 576), (3, 5, 128)])
def test_norms(dtype, shape):
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    close(norm_cpu.rms_norm(x, weight, 1e-5), norm_reference.rms_norm(x, weight, 1e-5))
    for result, expected in zip(
        norm_cpu.add_rms_norm(x, residual, weight, 1e-5),
        norm_reference.add_rms_norm(x, residual, weight, 1e-5),
        strict=True,
    ):
        close(result, expected)


@pytest.mark.parametrize("n", [1, 7, 16, 33, 576, 1000])
def test_each_bit_of_a_norm_of_bf16(n):
    """Squares of bf16 are exact in float32; they are added up in 16 parts, and those by halves."""
    x, residual, weight = torch.randn(40, n).bfloat16(), torch.randn(40, n).bfloat16(), torch.randn(n).bfloat16()
    total = residual + x
    parts = torch.zeros(40, 16)
    for squares in torch.nn.functional.pad(total.float().square(), (0, -n % 16)).split(16, dim=1):
        parts += squares
    while parts.shape[1] > 1:
        left, right = parts.chunk(2, dim=1)
        parts = left + right
    factor = 1 / (parts / n + torch.tensor(1e-5)).sqrt()
    expected = (total.float() * factor).bfloat16() * weight
    out, stored = norm_cpu.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(stored, total)
    assert torch.equal(out, expected)
    assert torch.equal(norm_cpu.rms_norm(total, weight, 1e-5), expected)
    heads = torch.stack((x, total, x), dim=1)[:, 1:2]  # rows that do not follow each other
    assert torch.equal(norm_cpu.rms_norm(heads, weight, 1e-5)[:, 0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 7), (300, 576), (3, 5, 128)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norms(dtype, shape, has_bias):
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight, bias = torch.randn(2, shape[-1]).to(dtype)
    bias = bias if has_bias else None
    close(layer_norm_cpu.layer_norm(x, weight, bias, 1e-5), layer_norm_reference.layer_norm(x, weight, bias, 1e-5))
    for result, expected in zip(
        layer_norm_cpu.add_layer_norm(x, residual, weight, bias, 1e-5),
        layer_norm_reference.add_layer_norm(x, residual, weight, bias, 1e-5),
        strict=True,
    ):
        close(result, expected)


def test_norm_of_a_slice_of_heads():
    heads = torch.randn(40, 6, 64).bfloat16()[:, 1:4]
    weight = torch.randn(64).bfloat16()
    close(norm_cpu.rms_norm(heads, weight, 1e-5), norm_reference.rms_norm(heads, weight, 1e-5))
    close(
        layer_norm_cpu.layer_norm(heads, weight, weight, 1e-5),
        layer_norm_reference.layer_norm(heads, weight, weight, 1e-5),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [64, 20])
def test_rotary(dtype, rotary_dim):
    heads = torch.randn(90, 8, 64).to(dtype)
    q, k = heads[:, :5], heads[:, 5:7]
    table = torch.randn(500, rotary_dim)
    positions = torch.randint(0, 500, (90,))
    for result, expected in zip(
        rotary_cpu.rotary(q, k, positions, table), rotary_reference.rotary(q, k, positions, table), strict=True
    ):
        close(result, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(3, 2 * 5), (200, 2 * 1536)])
def test_gated_activation(dtype, kind, shape):
    gate_up = (torch.randn(shape) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, math.nan, 0.0]).to(dtype)
    close(gated_cpu.gated_activation(gate_up, kind), gated_reference.gated_activation(gate_up, kind))


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_store_writes_the_same_bytes(dtype, cache_dtype):
    """Division and rounding are exact operations: each byte of caches is the specification's. Scales of float formats
    are sums, and equal but for their order."""
    k, v = (torch.randn(70, 6, 33) * torch.logspace(-9, 4, 70)[:, None, None]).to(dtype).split(3, dim=1)
    k[3, 1], v[4, 2, 5], v[5, 0, 0] = 0.0, math.nan, math.inf
    slots = torch.randperm(80)[:70].where(torch.arange(70) % 9 != 0, -1)
    found, expected = (stored(backend.kv_store, k, v, slots, cache_dtype) for backend in (store_cpu, store_reference))
    for i, (ours, wanted) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(ours, wanted, rtol=0 if i < 2 else 1e-6, atol=0)


def stored(kv_store, k, v, slots, cache_dtype):
    """What lies in fresh caches and scales afterwards, every NaN alike."""
    caches = [torch.zeros(5, 3, 16, 33, dtype=torch.float32).to(cache_dtype) for _ in "kv"]
    scales = [torch.zeros(5, 3, 16) if cache_dtype.itemsize == 1 else None for _ in "kv"]
    kv_store(k, v, *caches, slots, *scales)
    return [t.float().nan_to_num(nan=12345.0, posinf=1e38) for t in (*caches, *scales) if t is not None]


def test_a_row_does_not_depend_on_threads():
    x, weight = torch.randn(3000, 576).bfloat16(), torch.randn(576).bfloat16()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(
            torch.stack((norm_cpu.rms_norm(x, weight, 1e-5), layer_norm_cpu.layer_norm(x, weight, weight, 1e-5)))
        )
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("rotary_dim", [32, 12])
@pytest.mark.parametrize("has_offset", [False, True])
def test_fused_pass_has_the_bits_of_rotary_and_kv_store(cache_dtype, rotary_dim, has_offset):
    heads = torch.randn(70, 9, 33).bfloat16()
    q, k, v = heads.split([5, 2, 2], dim=1)
    positions, table = torch.randint(0, 90, (70,)), torch.randn(90, rotary_dim)
    slots = torch.randperm(80)[:70].where(torch.arange(70) % 9 != 0, -1)
    caches = [[torch.zeros(5, 2, 16, 33).to(cache_dtype) for _ in "kv"] for _ in range(2)]
    scales = [[torch.zeros(5, 2, 16) if cache_dtype.itemsize == 1 else None for _ in "kv"] for _ in range(2)]
    offset = torch.randn(4, 2, 33) * 3 if has_offset and cache_dtype.itemsize == 1 else None
    token_positions = torch.randint(0, 1024, (70,))
    fused_q = rotary_kv_store(q, k, v, positions, table, *caches[0], slots, *scales[0], offset, None, token_positions)
    rotated_q, rotated_k = rotary_cpu.rotary(q, k, positions, table)
    if offset is not None:
        rotated_k = rotated_k.float() - offset[token_positions // 256]
        v = v.float()
    store_cpu.kv_store(rotated_k, v, *caches[1], slots, *scales[1])
    assert torch.equal(fused_q, rotated_q)
    for fused, apart in zip((*caches[0], *scales[0]), (*caches[1], *scales[1]), strict=True):
        assert fused is None or torch.equal(fused.float(), apart.float())
    assert any(bool(cache.float().any()) for cache in caches[0])
