"""Products of 8-bit operands and dequantisation of the gpu backend of quantized_linear against the references, under
Triton's interpreter. Run by test_triton_interpreter.py, like triton_interpreted.py."""

import math

import pytest
import torch
from batchinfer.kernels.common import triton_targets
from batchinfer.kernels.quantized_linear import Fp8Weight, IntegerWeight, gpu_fp8, gpu_int8, gpu_tiles, reference
from batchinfer.kernels.quantized_linear import gpu as linear_gpu
from batchinfer.kernels.quantized_linear.fp8 import by_channel
from batchinfer.kernels.quantized_linear.gpu_dequantize import dequantize

DTYPES = [torch.float32, torch.float16]  # the interpreter's bf16 is wrong
# Dtypes and numbers of rows.
CALLS = [(torch.float32, 1), (torch.float16, 5), pytest.param(torch.float16, 70, marks=pytest.mark.slow)]
LIBRARY_ROWS = linear_gpu.LIBRARY_ROWS[triton_targets.INTERPRETED.generation]


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    """Memory that torch.empty gives holds NaN, or bytes that are it in e4m3: a place that a kernel leaves out shows."""
    empty = torch.empty

    def poisoned(*shape, **options):
        tensor = empty(*shape, **options)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor.fill_(0x7F)

    monkeypatch.setattr(torch, "empty", poisoned)


def integer_weight(bits, group, rows, columns, form, permuted=False):
    """form: zeros, odd (zeros that are no whole numbers) or offsets."""
    groups = -(-columns // group)
    shifts = torch.rand(rows, groups) * 2**bits
    scales = torch.rand(rows, groups).half() * 0.1
    return IntegerWeight(
        bits,
        group,
        torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8),
        scales,
        {"zeros": shifts.round(), "odd": shifts + 0.25, "offsets": None}[form],
        (-shifts * scales).half() if form == "offsets" else None,
        torch.randperm(columns) if permuted else None,
    )


def hadamard():
    """Sylvester's construction, orthonormal."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(6):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / 8


# ---- int8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 100), (17, 400)])
def test_rows_are_rotated_and_rounded_by_group(dtype, shape):
    x = torch.randn(shape).to(dtype)
    values, scales = gpu_int8.quantize_rows(x)
    groups = -(-shape[1] // 192)
    padded = torch.zeros(shape[0], groups * 192, dtype=torch.float64)
    padded[:, : shape[1]] = x
    rotated = (padded.view(shape[0], -1, 64) @ hadamard()).view(shape[0], groups, 192)
    scales = scales[:, : shape[0]].T.double()
    torch.testing.assert_close(scales, rotated.abs().amax(-1) / 127, rtol=1e-5, atol=0)
    values = values.view(shape[0], groups, 192)
    assert (values.abs().amax(-1) == 127).all()
    assert ((values * scales.unsqueeze(-1) - rotated).abs() <= 0.501 * scales.unsqueeze(-1)).all()


def test_faulty_and_empty_groups_of_rows():
    x = torch.randn(4, 400)
    x[0, 5], x[1, 300], x[2] = math.nan, math.inf, 0.0
    x[3, :192] = 1e-34
    values, scales = gpu_int8.quantize_rows(x)
    assert scales[:, :4].isnan().T.tolist() == [[True, False, False], [False, True, False], [False] * 3, [False] * 3]
    assert values[2].abs().sum() == 0
    assert values[3, :192].abs().sum() == 0
    assert scales[:, 2].tolist() == [0.0] * 3
    assert scales[0, 3] == 0


@pytest.mark.parametrize(("dtype", "num_rows"), CALLS)
@pytest.mark.parametrize(("n", "k"), [(70, 100), (33, 576), (129, 200)])
def test_int8_products(dtype, num_rows, n, k):
    """Against the reference: its own rounding of the same numbers, which a few of may fall to the other side."""
    weight, bias = torch.randn(n, k), torch.randn(n) if num_rows != 1 else None
    x, packed = torch.randn(num_rows, k).to(dtype), gpu_int8.quantize_weight(weight)
    out, expected = torch.empty(num_rows, n, dtype=dtype), torch.zeros(num_rows, n)
    gpu_int8.quantized_linear(x, packed, bias, out)
    reference.quantized_linear(x, packed, bias, expected)
    step = packed.scales.max() * 127 * x.abs().max() * 8 / 127  # of one number to its neighbour
    difference = (out.float() - expected).abs()
    rounding = 1e-5 if dtype == torch.float32 else 2e-3
    close = difference <= rounding * (expected.abs() + 1)
    assert close.float().mean() > 0.98
    assert (difference <= step).all()


def test_int8_weights_are_the_references():
    weight = torch.randn(70, 200).half()
    found, expected = gpu_int8.quantize_weight(weight), reference.quantize_weight(weight)
    for a, b in zip(found.rows(), expected.rows(), strict=True):
        assert torch.equal(a, b)
    assert found.nbytes == 70 * 384 + 4 * 2 * 70


def test_int8_products_of_whole_numbers_are_exact():
    """Rotations of whole numbers up to 127 have the scale 1 and no rounding; sums reach 192 * 127 * 127."""
    spectra = torch.randint(-127, 128, (3 + 40, 6, 64)).double()
    spectra[:, :, 5] = 127
    spectra[0], spectra[3] = 127, -127
    plain = (spectra @ hadamard()).flatten(1).float()
    out = torch.empty(3, 40)
    gpu_int8.quantized_linear(plain[:3], gpu_int8.quantize_weight(plain[3:]), None, out)
    expected = torch.einsum("mgk,ngk->mn", spectra[:3], spectra[3:])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=0.5)
    assert out[0, 0] == -2 * 192 * 127 * 127


def test_int8_products_of_many_inputs_are_cut():
    weight, x = torch.randn(40, 192 * 17), torch.randn(2, 192 * 17)
    assert gpu_tiles.splits(40, 2, 17) == 4
    packed, bias = gpu_int8.quantize_weight(weight), torch.randn(40)
    out, expected = torch.empty(2, 40), torch.zeros(2, 40)
    gpu_int8.quantized_linear(x, packed, bias, out)
    reference.quantized_linear(x, packed, bias, expected)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=0.3)


# ---- fp8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [64, 100, 576])
def test_tokens_have_the_codes_of_the_reference(dtype, k):
    x = torch.randn(6, k).to(dtype) * torch.tensor([1, 1e-3, 1e3, 1, 1, 1]).view(6, 1).to(dtype)
    x[3], x[4, 7], x[5, 0] = 0.0, math.nan, -math.inf
    weight = gpu_fp8.pack_weight(integer_weight(4, 32, 8, k, "offsets"))
    codes, scales, sums = gpu_fp8._quantized(x, weight)
    expected, expected_scales = reference.encode_rows(x)
    assert torch.equal(codes[:4, :k].view(torch.float8_e4m3fn).float(), expected[:4].float())
    assert not codes[:, k:].any()
    assert torch.equal(scales[:4], expected_scales[:4, 0])
    assert scales.isnan().tolist() == expected_scales[:, 0].isnan().tolist() == [False] * 4 + [True] * 2
    numbers = torch.zeros(4, codes.shape[1])
    numbers[:, :k] = expected[:4].float()
    torch.testing.assert_close(sums[:, :4].T, numbers.view(4, -1, 32).sum(2))


FP8_WEIGHTS = [
    (4, 128, 70, 256, "zeros", False),
    (4, 64, 33, 320, "zeros", False),
    (4, 32, 130, 96, "odd", False),
    (4, 64, 40, 192, "offsets", True),
    (3, 100, 21, 100, "zeros", True),
    (2, 192, 20, 576, "odd", False),
]


def check_fp8(packed, dense, dtype, num_rows, biased):
    """The product of what the tokens' codes and the weight stand for, in float64."""
    n, k = dense.shape
    x, bias = torch.randn(num_rows, k).to(dtype), torch.randn(n) if biased else None
    out = torch.empty(num_rows, n, dtype=dtype)
    gpu_fp8.fp8_linear(x, packed, bias, out)
    scales = x.double().abs().amax(1, keepdim=True) / 448
    inverse = torch.tensor(448.0) / x.float().abs().amax(1, keepdim=True)
    tokens = (x.float() * inverse).to(torch.float8_e4m3fn).double() * scales
    expected = tokens @ dense.double().T + (0 if bias is None else bias.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize(("dtype", "num_rows"), CALLS)
@pytest.mark.parametrize("form", FP8_WEIGHTS)
def test_fp8_products_with_integers(dtype, num_rows, form):
    weight = integer_weight(*form)
    check_fp8(gpu_fp8.pack_weight(weight), weight.dequantize(), dtype, num_rows, biased=num_rows != 1)


@pytest.mark.parametrize(("num_rows", "block"), [(3, (1, 320)), (3, (40, 64)), (70, (70, 128)), (3, (70, 320))])
def test_fp8_products_with_fp8(num_rows, block):
    values = torch.randn(70, 320).to(torch.float8_e4m3fn)
    weight = Fp8Weight(values, torch.rand(-(-70 // block[0]), -(-320 // block[1])) + 0.1, block)
    check_fp8(gpu_fp8.pack_weight(weight), weight.dequantize(), torch.float16, num_rows, biased=True)


def test_fp8_products_of_many_inputs_are_cut():
    weight = integer_weight(4, 128, 64, 4096, "zeros")
    check_fp8(gpu_fp8.pack_weight(weight), weight.dequantize(), torch.float32, 2, biased=True)


def test_fp8_faults_stay_in_their_token():
    weight = gpu_fp8.pack_weight(by_channel(torch.randn(20, 64)))
    x, out = torch.randn(4, 64), torch.empty(4, 20)
    x[1, 3], x[2, 9] = math.nan, math.inf
    gpu_fp8.fp8_linear(x, weight, None, out)
    assert out.isnan().all(1).tolist() == [False, True, True, False]
    assert out.isnan().any(1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("run", [gpu_fp8.fp8_linear, gpu_int8.quantized_linear, linear_gpu.packed_linear])
def test_no_rows(run):
    weight = integer_weight(4, 32, 40, 64, "zeros")
    packed = (
        gpu_int8.quantize_weight(weight.dequantize())
        if run == gpu_int8.quantized_linear
        else linear_gpu.pack_weight(weight)
    )
    run(torch.empty(0, 64), packed, None, torch.empty(0, 40))


# ---- many rows


WEIGHTS = [
    integer_weight(4, 128, 70, 256, "zeros"),
    integer_weight(4, 32, 33, 96, "odd"),
    integer_weight(4, 64, 40, 192, "offsets", permuted=True),
    integer_weight(3, 100, 21, 100, "zeros", permuted=True),
    integer_weight(8, 64, 33, 320, "offsets"),
    Fp8Weight(torch.randn(70, 320).to(torch.float8_e4m3fn), torch.rand(2, 3) + 0.1, (40, 128)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_dequantised_weights_have_the_bits_of_the_reference(dtype, weight):
    packed = linear_gpu.pack_weight(weight)
    out = torch.empty(weight.shape, dtype=dtype)
    dequantize(packed, out)
    expected = weight.dequantize(dtype)
    assert torch.equal(out, expected if packed.permutation is None else expected[:, packed.permutation])
    assert packed.scratch_bytes(dtype) == out.nbytes


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("weight", [WEIGHTS[0], WEIGHTS[2]])
def test_many_rows_go_through_the_library(monkeypatch, weight, biased):
    packed, k = linear_gpu.pack_weight(weight), weight.shape[1]
    x, bias = torch.randn(LIBRARY_ROWS, k), torch.randn(weight.shape[0]) if biased else None
    expected = x.double() @ weight.dequantize().double().T + (0 if bias is None else bias.double())
    monkeypatch.delattr(linear_gpu, "_packed_linear")  # the fused kernel is not there to be called
    out = torch.empty(LIBRARY_ROWS, weight.shape[0])
    linear_gpu.packed_linear(x, packed, bias, out)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_results_wider_than_the_activations_never_do():
    """The library rounds to the activations' format."""
    weight = integer_weight(4, 64, 20, 64, "zeros")
    x, out = torch.randn(LIBRARY_ROWS, 64).half(), torch.empty(LIBRARY_ROWS, 20)
    linear_gpu.packed_linear(x, linear_gpu.pack_weight(weight), None, out)
    expected = x.double() @ weight.dequantize(torch.float16).double().T
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
