"""rms_norm, layer_norm, rotary and gated_activation against their formulas in float64."""

import math

import pytest
import torch
from batchinfer.kernels.gated_activation import gated_activation
from batchinfer.kernels.layer_norm import add_layer_norm, layer_norm
from batchinfer.kernels.rms_norm import add_rms_norm, rms_norm
from batchinfer.kernels.rotary import rotary


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("shape", [(5, 64), (3, 4, 20)])
def test_rms_norm(dtype, tolerance, shape):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    result = rms_norm(x, weight, 1e-5)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


def test_add_rms_norm_leaves_its_inputs():
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    x_before, residual_before = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x_before + residual_before)
    assert torch.equal(normed, rms_norm(total, weight, 1e-6))
    assert torch.equal(x, x_before)
    assert torch.equal(residual, residual_before)


def test_rms_norm_row_is_independent_of_other_rows():
    x, weight = torch.randn(300, 576).bfloat16(), torch.randn(576).bfloat16()
    whole = rms_norm(x, weight, 1e-5)
    assert all(torch.equal(rms_norm(x[i : i + 1], weight, 1e-5), whole[i : i + 1]) for i in (0, 7, 299))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("shape", [(5, 64), (3, 4, 20)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm(dtype, tolerance, shape, has_bias):
    x, weight = (torch.randn(shape) * 3 + 5).to(dtype), torch.randn(shape[-1]).to(dtype)
    bias = torch.randn(shape[-1]).to(dtype) if has_bias else None
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    expected = expected + bias.double() if has_bias else expected
    result = layer_norm(x, weight, bias, 1e-5)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


def test_layer_norm_keeps_its_precision_far_from_zero():
    x = torch.randn(4, 512) + 3000
    expected = torch.nn.functional.layer_norm(x.double(), (512,), eps=1e-5)
    torch.testing.assert_close(layer_norm(x, torch.ones(512), None, 1e-5).double(), expected, rtol=0, atol=2e-3)


def test_add_layer_norm_leaves_its_inputs():
    x, residual, weight, bias = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), torch.randn(8)
    x_before, residual_before = x.clone(), residual.clone()
    normed, total = add_layer_norm(x, residual, weight, bias, 1e-6)
    assert torch.equal(total, x_before + residual_before)
    assert torch.equal(normed, layer_norm(total, weight, bias, 1e-6))
    assert torch.equal(x, x_before)
    assert torch.equal(residual, residual_before)


def test_layer_norm_row_is_independent_of_other_rows():
    x, weight, bias = torch.randn(300, 576).bfloat16(), torch.randn(576).bfloat16(), torch.randn(576).bfloat16()
    whole = layer_norm(x, weight, bias, 1e-5)
    assert all(torch.equal(layer_norm(x[i : i + 1], weight, bias, 1e-5), whole[i : i + 1]) for i in (0, 7, 299))


def test_layer_norm_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="weight \\(4,\\)"):
        layer_norm(torch.zeros(2, 5), torch.zeros(4), None, 1e-5)
    with pytest.raises(ValueError, match="bias \\(6,\\)"):
        layer_norm(torch.zeros(2, 5), torch.zeros(5), torch.zeros(6), 1e-5)
    with pytest.raises(ValueError, match="residual"):
        add_layer_norm(torch.zeros(2, 5), torch.zeros(3, 5), torch.zeros(5), None, 1e-5)


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotary_turns_pairs_by_the_angle(rotary_dim):
    half = rotary_dim // 2
    q, k = torch.randn(3, 4, 16), torch.randn(3, 2, 16)
    angles = torch.rand(10, half, dtype=torch.float64) * 6
    positions = torch.tensor([9, 0, 4])
    table = torch.cat((angles.cos(), angles.sin()), -1).float()
    for before, after in zip((q, k), rotary(q, k, positions, table), strict=True):
        pairs = torch.complex(before[..., :half].double(), before[..., half:rotary_dim].double())
        turned = pairs * torch.exp(1j * angles[positions])[:, None]
        expected = torch.cat((turned.real, turned.imag, before[..., rotary_dim:].double()), -1)
        torch.testing.assert_close(after.double(), expected, rtol=1e-5, atol=1e-6)
        assert after.is_contiguous()


def test_rotary_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="rotary_dim 18"):
        rotary(torch.zeros(1, 1, 16), torch.zeros(1, 1, 16), torch.tensor([0]), torch.zeros(1, 18))
    with pytest.raises(ValueError, match="2 queries"):
        rotary(torch.zeros(2, 1, 16), torch.zeros(1, 1, 16), torch.tensor([0]), torch.zeros(1, 16))


def test_gated_activation():
    gate, up = torch.randn(4, 10), torch.randn(4, 10)
    x = gate.double()
    tanh_argument = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    expected = {
        "silu": x / (1 + torch.exp(-x)),
        "gelu": x * (1 + torch.erf(x / math.sqrt(2))) / 2,
        "gelu_tanh": x * (1 + torch.tanh(tanh_argument)) / 2,
    }
    for kind, value in expected.items():
        result = gated_activation(torch.cat((gate, up), -1), kind)
        torch.testing.assert_close(result.double(), value * up.double(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="kind = 'relu'"):
        gated_activation(torch.zeros(1, 2), "relu")
