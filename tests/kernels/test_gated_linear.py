"""gated_linear: bit for bit the product and then the activation, of each form of weight, and paired weights beside
those whose outputs lie in their order."""

import math

import pytest
import torch
from batchinfer.kernels.gated_activation import gated_activation
from batchinfer.kernels.quantized_linear import (
    Fp8Weight,
    IntegerWeight,
    gated_linear,
    pack_weight,
    packed_linear,
    quantize_weight,
    quantized_linear,
    reference,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = ["int4", "int4_permuted", "int3_offsets", "int8", "int8_offsets", "fp8", "bf16", "quantized"]
ROWS = 600


@pytest.fixture(autouse=True)
def _seeded_on_two_threads():
    before = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def stored_weight(form, rows, columns):
    """Of numbers about 1 / 8, in groups of 50 inputs."""
    if form in ("bf16", "quantized"):
        return torch.randn(rows, columns).bfloat16() / 8
    groups = math.ceil(columns / 50)
    if form == "fp8":
        values = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        return Fp8Weight(values, (torch.rand(math.ceil(rows / 7), groups) + 0.1) / 8, (7, 50))
    bits = int(form[3])
    scales = (torch.rand(rows, groups) + 0.1) / 2 ** (bits + 2)
    zeros = torch.randint(0, 2**bits, (rows, groups)).float()
    offsets = torch.randn(rows, groups) / 8 if form.endswith("offsets") else None
    permutation = torch.randperm(columns) if form.endswith("permuted") else None
    values = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8)
    return IntegerWeight(bits, 50, values, scales, zeros if offsets is None else None, offsets, permutation)


def pack(form, stored, is_gated):
    return quantize_weight(stored, is_gated) if form == "quantized" else pack_weight(stored, is_gated)


def product_of(form):
    return quantized_linear if form == "quantized" else packed_linear


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_the_bits_are_those_of_a_product_and_an_activation(form, dtype, has_bias):
    stored = stored_weight(form, 96, 130)
    x, bias = torch.randn(ROWS, 130).to(dtype), torch.randn(96) if has_bias else None
    ordered, paired = pack(form, stored, is_gated=False), pack(form, stored, is_gated=True)
    assert paired.is_paired
    assert not ordered.is_paired
    outputs = product_of(form)(x, ordered, bias)
    for kind in ("silu", "gelu_tanh"):
        expected = gated_activation(outputs, kind)
        for count in (1, 2, 5, 10, 11, 13, 25, 192, 241, ROWS):
            assert torch.equal(gated_linear(x[:count], paired, bias, kind), expected[:count]), (kind, count)
            assert torch.equal(gated_linear(x[-count:], paired, bias, kind), expected[-count:]), (kind, count)
        assert torch.equal(gated_linear(x, ordered, bias, kind), expected)
        torch.set_num_threads(1)
        assert torch.equal(gated_linear(x, paired, bias, kind), expected)
        assert gated_linear(x[:0], paired, bias, kind).shape == (0, 48)
    assert torch.equal(gated_linear(x, paired, bias, "gelu"), gated_activation(outputs, "gelu"))


@pytest.mark.parametrize("shape", [(32, 1), (64, 6), (224, 257), (512, 64)])
@pytest.mark.parametrize("form", FORMS)
def test_a_paired_weight_is_the_same_weight(form, shape):
    if shape[1] < 50:
        form = "bf16" if form != "quantized" else form  # groups of 50 inputs need as many
    stored = stored_weight(form, *shape)
    ordered, paired = pack(form, stored, is_gated=False), pack(form, stored, is_gated=True)
    assert paired.is_paired
    assert paired.nbytes == ordered.nbytes
    if form == "quantized":
        assert all(torch.equal(*both) for both in zip(paired.rows(), ordered.rows(), strict=True))
        plain = reference.quantize_weight(stored, is_gated=True)
        assert torch.equal(plain.values, paired.values)
        assert torch.equal(plain.offsets, paired.offsets)
        assert plain.is_paired
    else:
        assert torch.equal(paired.dequantize(torch.float32), ordered.dequantize(torch.float32))
    for dtype in DTYPES:
        x, bias = torch.randn(30, shape[1]).to(dtype), torch.randn(shape[0])
        for count in (3, 30):
            out = [
                product_of(form)(x[:count], weight, bias, torch.empty(count, shape[0])) for weight in (ordered, paired)
            ]
            assert torch.equal(*out)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_paired_weight_lie_by_pairs(form):
    """Rows that hold their own number: of each 32 outputs stored, 16 are the gate's and 16 their partners."""
    stored = torch.arange(96.0).unsqueeze(1).expand(96, 64).bfloat16()
    if form == "quantized":
        scales = quantize_weight(stored, is_gated=True).scales * 127 / 8  # of ones, the rotation makes 8
        order = scales[:, 0].flatten().round().tolist()
    else:
        weight = Fp8Weight(torch.ones(96, 64).to(torch.float8_e4m3fn), torch.arange(96.0).unsqueeze(1), (1, 64))
        if form == "bf16":
            order = pack_weight(stored, is_gated=True).values[:, 0, 0, :, 0].flatten().tolist()
        else:
            order = pack_weight(weight, is_gated=True).parameters[:, 0, 0].flatten().tolist()
    expected = [*range(16), *range(48, 64), *range(16, 32), *range(64, 80), *range(32, 48), *range(80, 96)]
    assert order == expected


@pytest.mark.parametrize("num_outputs", [2, 48, 70])
@pytest.mark.parametrize("form", ["int4", "bf16", "quantized"])
def test_outputs_that_fill_no_blocks_keep_their_order(form, num_outputs):
    weight = pack(form, stored_weight(form, num_outputs, 64), is_gated=True)
    assert not weight.is_paired
    x = torch.randn(5, 64).bfloat16()
    expected = gated_activation(product_of(form)(x, weight), "silu")
    assert torch.equal(gated_linear(x, weight, None, "silu"), expected)


@pytest.mark.parametrize("form", ["int4", "bf16", "quantized"])
def test_the_formula(form):
    stored = stored_weight(form, 64, 192)
    x = torch.randn(20, 192)
    exact = stored.dequantize() if form == "int4" else stored
    gate, up = (x.double() @ exact.double().T).chunk(2, dim=1)
    result = gated_linear(x, pack(form, stored, is_gated=True), None, "silu")
    limit = 0.05 if form == "quantized" else 1e-4
    assert ((result - gate / (1 + (-gate).exp()) * up).abs() <= limit * (1 + (gate * up).abs())).all()


@pytest.mark.parametrize("form", ["int4", "bf16", "quantized"])
def test_faults_stay_in_their_row_and_visible(form):
    weight, x = pack(form, stored_weight(form, 64, 200), is_gated=True), torch.randn(20, 200).bfloat16()
    healthy = gated_linear(x, weight, None, "silu")
    x[3, 150] = math.nan
    result = gated_linear(x, weight, None, "silu")
    assert result[3].isnan().all()
    assert torch.equal(result[:3], healthy[:3])
    assert torch.equal(result[4:], healthy[4:])


def test_what_does_not_fit_is_refused():
    weight = pack_weight(torch.randn(64, 32).bfloat16(), is_gated=True)
    with pytest.raises(ValueError, match="32 inputs"):
        gated_linear(torch.randn(2, 31), weight, None, "silu")
    with pytest.raises(ValueError, match="bias must be float32"):
        gated_linear(torch.randn(2, 32), weight, torch.randn(64).bfloat16(), "silu")
    with pytest.raises(ValueError, match="kind = 'relu'"):
        gated_linear(torch.randn(2, 32), weight, None, "relu")
