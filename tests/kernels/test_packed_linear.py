"""Linear layers whose weights stay in the checkpoint's own bits: the packed form against the stored one, products
against plain arithmetic, rows that do not depend on each other, and faults that stay visible."""

import copy
import math
import pickle
from pathlib import Path

import pytest
import torch
from batchinfer.kernels.quantized_linear import (
    Fp8Weight,
    IntegerWeight,
    can_pack_bf16,
    cpu,
    pack_weight,
    packed_linear,
    quantize_weight,
    quantized_linear,
    reference,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# outputs, inputs, group size
SHAPES = [(96, 576, 64), (70, 100, 50), (33, 130, 32), (1, 1, 1), (40, 6, 6), (5, 257, 257), (64, 45, 3)]
BACKENDS = [cpu, reference]
KINDS = ["int2", "int3", "int4", "int4_offsets", "int4_permuted", "int8", "int8_offsets", "fp8", "bf16"]


@pytest.fixture(autouse=True)
def _seeded_on_two_threads():
    before = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def stored_weight(kind, rows, columns, group_size, scale_dtype=torch.float32):
    """What a checkpoint holds, of numbers about 1, and the same as a float32 matrix."""
    if kind == "bf16":
        weight = torch.randn(rows, columns).bfloat16()
        return weight, weight.float()
    groups = math.ceil(columns / group_size)
    if kind == "fp8":
        values = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        weight = Fp8Weight(values, torch.rand(math.ceil(rows / 7), groups) + 0.1, (min(7, rows), group_size))
        return weight, weight.dequantize()
    bits = int(kind[3])
    scales = ((torch.rand(rows, groups) + 0.1) / 2 ** (bits - 1)).to(scale_dtype)
    zeros = torch.randint(0, 2**bits, (rows, groups)).float()
    offsets = torch.randn(rows, groups).to(scale_dtype) if kind.endswith("offsets") else None
    permutation = torch.randperm(columns) if kind.endswith("permuted") else None
    values = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8)
    weight = IntegerWeight(bits, group_size, values, scales, zeros if offsets is None else None, offsets, permutation)
    return weight, weight.dequantize()


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_packing_keeps_each_number(kind, shape, scale_dtype):
    stored, exact = stored_weight(kind, *shape, scale_dtype)
    for dtype in DTYPES:
        assert torch.equal(pack_weight(stored).dequantize(dtype), exact.to(dtype))


def test_what_a_packed_weight_takes_in_memory():
    numbers = 96 * 576
    groups = numbers // 64
    for kind, scale_dtype, nbytes in [
        ("int4", torch.float16, numbers // 2 + 4 * groups),
        ("int4", torch.float32, numbers // 2 + 8 * groups),
        ("int3", torch.float16, numbers // 2 + 4 * groups),
        ("int4_permuted", torch.float16, numbers // 2 + 4 * groups + 4 * 576),
        ("int8", torch.float16, numbers + 4 * groups),
        ("fp8", torch.float32, numbers + 8 * groups),
        ("bf16", torch.float32, 2 * numbers),
    ]:
        assert pack_weight(stored_weight(kind, 96, 576, 64, scale_dtype)[0]).nbytes == nbytes, kind


def test_only_bf16_is_packed_as_it_is():
    with pytest.raises(ValueError, match="must be bf16"):
        pack_weight(torch.randn(4, 4))


def test_bf16_is_worth_packing_where_the_processor_multiplies_it():
    instructions = {"avx512_bf16", "avx512bw"}
    cpu_info = Path("/proc/cpuinfo")
    flags = set(cpu_info.read_text().split()) if cpu_info.exists() else set()
    weight = torch.zeros(2, 2)
    assert can_pack_bf16(weight.bfloat16()) == (instructions <= flags)
    assert not can_pack_bf16(weight)
    assert not can_pack_bf16(weight.half())


def plain(x, exact, bias):
    """float64, with the weight rounded to x's dtype."""
    return x.double() @ exact.to(x.dtype).double().T + bias.double()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_product(kind, shape, dtype, backend):
    stored, exact = stored_weight(kind, *shape)
    x, bias, out = torch.randn(13, shape[1]).to(dtype), torch.randn(shape[0]), torch.empty(13, shape[0])
    backend.packed_linear(x, pack_weight(stored), bias, out)
    terms = x.double().abs() @ exact.double().abs().T + 1
    assert ((out.double() - plain(x, exact, bias)).abs() <= 1e-6 * terms).all()


@pytest.mark.parametrize("count", [1, 257])  # unpacked in registers, and into panels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_hot_rows_read_out_each_number_of_the_weight(kind, dtype, count):
    """Products with 1 and 0 are exact, so that what comes out is the weight as it was rounded to x's dtype."""
    stored, exact = stored_weight(kind, 65, 257, 60)
    weight, rows = pack_weight(stored), torch.eye(257, dtype=dtype)
    for first in range(0, 257, count if count > 1 else 16):
        out = packed_linear(rows[first : first + count], weight, out=torch.empty(count, 65))
        assert torch.equal(out, exact.to(dtype).float().T[first : first + count])


def test_more_rows_than_a_block_is_unpacked_for_once_and_rows_that_share_cache_lines():
    stored, exact = stored_weight("int4", 33, 2048, 64)
    x, bias = torch.randn(2060, 2048).bfloat16(), torch.zeros(33)
    result = packed_linear(x, pack_weight(stored), out=torch.empty(2060, 33))
    torch.testing.assert_close(result.double(), plain(x, exact, bias), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int4", "int4_permuted", "int8_offsets", "fp8", "bf16"])
def test_a_row_does_not_depend_on_the_batch(kind, dtype):
    weight, bias = pack_weight(stored_weight(kind, 97, 320, 64)[0]), torch.randn(97)
    x = torch.randn(130, 320).to(dtype)
    whole = packed_linear(x, weight, bias)
    for count in [*range(1, 30), 64, 129]:
        assert torch.equal(packed_linear(x[:count], weight, bias), whole[:count]), count
        assert torch.equal(packed_linear(x[-count:], weight, bias), whole[-count:]), count
    torch.set_num_threads(1)
    assert torch.equal(packed_linear(x, weight, bias), whole)
    assert packed_linear(x[:0], weight, bias).shape == (0, 97)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_float_format_is_written(dtype):
    x, weight = torch.randn(20, 100).bfloat16(), pack_weight(stored_weight("int4", 70, 100, 50)[0])
    exact = packed_linear(x, weight, out=torch.empty(20, 70))
    for count in (2, 20):
        assert torch.equal(
            packed_linear(x[:count], weight, out=torch.empty(count, 70, dtype=dtype)), exact.to(dtype)[:count]
        )


@pytest.mark.parametrize("kind", ["int4", "fp8", "bf16"])
def test_faults_stay_in_their_row_and_visible(kind):
    weight, x = pack_weight(stored_weight(kind, 40, 200, 50)[0]), torch.randn(20, 200).bfloat16()
    healthy = packed_linear(x, weight)
    x[3, 150], x[8, 0], x[11, 199] = math.nan, math.inf, -math.inf
    result = packed_linear(x, weight)
    ill = [3, 8, 11]
    assert not result[ill].isfinite().any()
    others = [row for row in range(20) if row not in ill]
    assert torch.equal(result[others], healthy[others])
    assert not packed_linear(x[3:4], weight).isfinite().any()


def test_what_does_not_fit_is_refused():
    weight = pack_weight(torch.randn(10, 64).bfloat16())
    with pytest.raises(ValueError, match="64 inputs"):
        packed_linear(torch.randn(2, 63), weight)
    with pytest.raises(ValueError, match="bias must be float32"):
        packed_linear(torch.randn(2, 64), weight, torch.randn(10).bfloat16())
    with pytest.raises(ValueError, match="out must be dense"):
        packed_linear(torch.randn(2, 64), weight, out=torch.empty(10, 2).T)


@pytest.mark.parametrize("make", [pack_weight, quantize_weight])
def test_a_weight_that_was_used_can_be_copied_and_sent(make):
    x, weight = torch.randn(3, 64, dtype=torch.bfloat16), make(torch.randn(32, 64, dtype=torch.bfloat16))
    product = packed_linear if make is pack_weight else quantized_linear
    expected, bias = product(x, weight), torch.randn(32)
    for copied in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert torch.equal(product(x, copied), expected)
        (copied.values if make is pack_weight else copied.scales).zero_()
        assert torch.equal(product(x, copied, bias), bias.expand(3, 32).to(torch.bfloat16))
    assert torch.equal(product(x, weight), expected)
