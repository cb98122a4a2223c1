"""8-bit linear layers: the quantised weight against plain arithmetic, both backends against the product that its
integers stand for, rows that do not depend on each other, and faults that stay visible."""

import math

import pytest
import torch
from batchinfer.kernels.quantized_linear import cpu, quantize_weight, quantized_linear, reference

ROTATION, GROUP = 64, 192
SHAPES = [(576, 576), (70, 100), (32, 64), (1, 1), (97, 1536), (2100, 65)]  # outputs, inputs
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BACKENDS = [cpu, reference]


@pytest.fixture(autouse=True)
def _seeded_on_two_threads():
    before = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def hadamard():
    """Sylvester's construction, orthonormal."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(6):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / 8


def rotated_groups(x):
    """float64 [n, groups, GROUP]; what lies beyond the inputs is 0."""
    padded = torch.zeros(len(x), math.ceil(x.shape[1] / GROUP) * GROUP, dtype=torch.float64)
    padded[:, : x.shape[1]] = x
    return (padded.view(len(x), -1, ROTATION) @ hadamard()).view(len(x), -1, GROUP)


def in_groups(values):
    """[n, whole rotations] as rotated_groups gives it."""
    padded = torch.zeros(len(values), math.ceil(values.shape[1] / GROUP) * GROUP, dtype=torch.float64)
    padded[:, : values.shape[1]] = values
    return padded.view(len(values), -1, GROUP)


def run(backend, x, weight, bias=None, dtype=torch.float32):
    out = torch.full((len(x), weight.num_outputs), math.nan, dtype=dtype)
    backend.quantized_linear(x, weight, bias, out)
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_is_rotated_and_rounded_by_group(backend, dtype, shape):
    weight = torch.randn(shape).to(dtype)
    values, scales = backend.quantize_weight(weight).rows()
    assert values.shape == (shape[0], math.ceil(shape[1] / ROTATION) * ROTATION)
    rotated, values = rotated_groups(weight), in_groups(values)
    torch.testing.assert_close(scales.double(), rotated.abs().amax(-1) / 127, rtol=1e-5, atol=0)
    assert (values.abs().amax(-1) == 127).all()
    error = (values * scales.double().unsqueeze(-1) - rotated).abs()
    assert (error <= 0.5001 * scales.double().unsqueeze(-1)).all()


def test_backends_pack_alike():
    weight = torch.randn(2100, 200)
    weight[7] = 0
    native, plain = cpu.quantize_weight(weight), reference.quantize_weight(weight)
    assert torch.equal(native.values, plain.values)
    assert torch.equal(native.offsets, plain.offsets)
    torch.testing.assert_close(native.scales, plain.scales, rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_take_back_the_unsigned_bytes(backend):
    weight = backend.quantize_weight(torch.randn(40, 200))
    values = weight.values.to(torch.int64).sum(-1)  # [blocks, inputs / 4, 32]
    sums = torch.stack((values[:, :48].sum(1), values[:, 48:].sum(1)), dim=1)
    assert torch.equal(weight.offsets.to(torch.int64), -128 * sums)
    assert weight.nbytes == 64 * 256 + 2 * 4 * 64 * 2


def test_whole_numbers_go_through_exactly():
    """Weights and activations whose rotations are whole numbers up to 127 have scale 1 and no rounding."""
    spectra = torch.randint(-126, 127, (9 + 50, 6, ROTATION)).double()
    spectra[:, :, 5] = 127
    plain = (spectra @ hadamard()).flatten(1).float()
    expected = torch.einsum("mgk,ngk->mn", spectra[:9], spectra[9:])
    for backend in BACKENDS:
        result = run(backend, plain[:9], quantize_weight(plain[9:]))
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=0.5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_of_the_rounded_operands(backend, dtype, shape):
    x, bias = torch.randn(13, shape[1]).to(dtype), torch.randn(shape[0])
    weight = quantize_weight(torch.randn(shape))
    rotated = rotated_groups(x.double())
    x_scales = rotated.abs().amax(-1, keepdim=True) / 127
    # A value at a rounding border may fall to either side in float32: one step of one of the operands.
    x_values = (rotated / x_scales).round()
    borders = ((rotated / x_scales - x_values).abs() > 0.4999).sum((1, 2), keepdim=False)
    values, scales = weight.rows()
    values, scales = in_groups(values), scales.double()
    expected = torch.einsum("mgk,ngk->mn", x_values * x_scales, values * scales.unsqueeze(-1)) + bias
    step = 127 * x_scales.amax((1, 2)) * scales.amax() * borders
    error = (run(backend, x, weight, bias).double() - expected).abs()
    assert (error <= 1e-4 + 1e-5 * expected.abs() + step.unsqueeze(1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_backends_agree_and_write_any_float_format(dtype):
    x, weight = torch.randn(40, 300), quantize_weight(torch.randn(90, 300))
    native, plain = run(cpu, x, weight), run(reference, x, weight)
    torch.testing.assert_close(native, plain, rtol=1e-5, atol=1e-4)
    assert torch.equal(run(cpu, x, weight, dtype=dtype), native.to(dtype))


def test_outliers_cost_little():
    """A channel 200 times as large as the others, which would take all of a row's precision without rotation."""
    x, weight = torch.randn(64, 576), torch.randn(300, 576)
    x[:, 77] *= 200
    exact = x @ weight.T
    error = (quantized_linear(x, quantize_weight(weight)) - exact).norm() / exact.norm()
    assert error < 0.012


@pytest.mark.parametrize("shape", [(960, 576), (70, 100)])
def test_a_row_does_not_depend_on_the_batch(shape):
    weight, bias = quantize_weight(torch.randn(shape)), torch.randn(shape[0])
    x = torch.randn(300, shape[1]).bfloat16()
    whole = quantized_linear(x, weight, bias)
    for count in [*range(1, 40), *range(185, 200), 256, 299]:
        assert torch.equal(quantized_linear(x[:count], weight, bias), whole[:count]), count
        assert torch.equal(quantized_linear(x[-count:], weight, bias), whole[-count:]), count
    torch.set_num_threads(1)
    assert torch.equal(quantized_linear(x, weight, bias), whole)


@pytest.mark.parametrize("backend", BACKENDS)
def test_faults_stay_in_their_row_and_visible(backend):
    x = torch.randn(20, 200)
    weight = quantize_weight(torch.randn(40, 200))
    healthy = run(backend, x, weight)
    x[3, 150], x[8, 0], x[11, 199] = math.nan, math.inf, -math.inf
    result = run(backend, x, weight)
    ill = [3, 8, 11]
    assert not result[ill].isfinite().any()
    others = [row for row in range(20) if row not in ill]
    assert torch.equal(result[others], healthy[others])


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_and_tiny_values(backend):
    weight, bias = quantize_weight(torch.cat((torch.zeros(1, 128), torch.randn(9, 128)))), torch.randn(10)
    x = torch.zeros(3, 128)
    x[1, 5] = 1e-42
    x[2] = torch.randn(128)
    result = run(backend, x, weight, bias)
    assert torch.equal(result[:2], bias.expand(2, -1))
    assert result[2, 0] == bias[0]


def test_what_does_not_fit_is_refused():
    weight = quantize_weight(torch.randn(10, 64))
    with pytest.raises(ValueError, match="64 inputs"):
        quantized_linear(torch.randn(2, 63), weight)
    with pytest.raises(ValueError, match="bias must be float32"):
        quantized_linear(torch.randn(2, 64), weight, torch.randn(10).bfloat16())
    with pytest.raises(ValueError, match="out must be dense"):
        quantized_linear(torch.randn(2, 64), weight, out=torch.empty(10, 2).T)
