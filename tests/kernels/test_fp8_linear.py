"""Linear layers in e4m3 on a CPU: tokens and weights against plain arithmetic, both backends against the product that
their numbers stand for, and faults that stay visible."""

import math

import pytest
import torch
from batchinfer.kernels.quantized_linear import (
    Fp8Weight,
    IntegerWeight,
    check_fp8_device,
    cpu,
    fp8_linear,
    pack_fp8_weight,
    reference,
)
from batchinfer.kernels.quantized_linear.fp8 import by_channel, centred

BACKENDS = [cpu, reference]


def nearest(x):
    """float64 [n, k] within 448, rounded to e4m3 by its definition: 3 bits after the first, exponents from -6 on."""
    exponent = x.abs().clamp(min=1e-300).log2().floor().clamp(min=-6)
    step = 2.0 ** (exponent - 3)
    return (x / step).round() * step


def tokens(x):
    """What the codes and scales of x's rows stand for, float64."""
    scales = x.double().abs().amax(1, keepdim=True) / 448
    inverse = torch.tensor(448.0) / x.float().abs().amax(1, keepdim=True)
    return nearest((x.float() * inverse).double()) * scales


def integers(bits, group, form):
    shifts = torch.rand(70, -(-100 // group)) * 2**bits
    scales = torch.rand(shifts.shape).half() * 0.1
    zeros = {"whole": shifts.round(), "odd": shifts, "offsets": None}[form]
    values = torch.randint(0, 2**bits, (70, 100), dtype=torch.uint8)
    return IntegerWeight(bits, group, values, scales, zeros, (shifts * scales).half() if form == "offsets" else None)


def test_a_channel_is_scaled_to_448():
    weight = torch.randn(3000, 40).bfloat16()
    weight[5] = 0
    stored = by_channel(weight)
    expected = weight.float().abs().amax(1, keepdim=True) / 448
    assert torch.equal(stored.scales, expected)
    close = tokens(torch.cat((weight[:5], weight[6:])).float())
    rows = torch.cat((stored.dequantize()[:5], stored.dequantize()[6:]))
    torch.testing.assert_close(rows.double(), close, rtol=1e-6, atol=0)
    assert not stored.dequantize()[5].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "weight",
    [
        integers(4, 32, "whole"),
        integers(4, 100, "odd"),
        integers(3, 20, "offsets"),
        by_channel(torch.randn(70, 100)),
        Fp8Weight(torch.randn(70, 100).to(torch.float8_e4m3fn), torch.rand(2, 4) + 0.1, (35, 25)),
    ],
    ids=["whole", "odd", "offsets", "channel", "blocks"],
)
def test_the_product_of_the_rounded_operands(backend, dtype, weight):
    x, bias = torch.randn(13, 100).to(dtype), torch.randn(70)
    x[3] *= 1e-3
    out = torch.full((13, 70), math.nan, dtype=dtype)
    backend.fp8_linear(x, pack_fp8_weight(weight), bias, out)
    expected = tokens(x) @ weight.dequantize().double().T + bias
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("weight", [torch.randn(70, 100), integers(8, 50, "whole")], ids=["floats", "bytes"])
def test_other_weights_become_e4m3_by_channel(weight):
    dense = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
    packed = pack_fp8_weight(weight)
    torch.testing.assert_close(packed.dequantize(torch.float32).double(), tokens(dense), rtol=1e-6, atol=0)


def test_faults_stay_in_their_token_and_small_tokens_are_zero():
    x, packed = torch.randn(5, 64), pack_fp8_weight(torch.randn(20, 64))
    x[1, 3], x[2, 9], x[3] = math.nan, -math.inf, 1e-33
    out = fp8_linear(x, packed)
    assert out.isnan().all(1).tolist() == out.isnan().any(1).tolist() == [False, True, True, False, False]
    assert not out[3].any()


def test_a_token_does_not_depend_on_the_batch():
    x, packed = torch.randn(50, 100).bfloat16(), pack_fp8_weight(integers(4, 20, "whole"))
    whole = fp8_linear(x, packed)
    for count in (1, 2, 3, 5, 16, 33):
        assert torch.equal(fp8_linear(x[:count], packed), whole[:count])


@pytest.mark.parametrize(("zeros", "is_kept"), [((0.0, 16.0), True), ((7.5, 3.0), False), ((-1.0, 3.0), False)])
def test_only_zeros_that_leave_exact_numbers_are_kept(zeros, is_kept):
    """e4m3 has each whole number up to 16."""
    values = torch.arange(16, dtype=torch.uint8).view(2, 8)
    weight = IntegerWeight(4, 8, values, torch.tensor([[0.5], [0.25]]), torch.tensor(zeros).view(2, 1))
    found = centred(weight)
    assert (found.zeros is not None) == is_kept
    assert torch.equal(found.dequantize(), weight.dequantize())
    if is_kept:
        whole = values.float() - torch.tensor(zeros).view(2, 1)
        assert torch.equal(whole.to(torch.float8_e4m3fn).float(), whole)


def test_devices_without_e4m3_are_named(monkeypatch):
    pytest.importorskip("triton")
    from batchinfer.kernels.common import triton_targets

    check_fp8_device(torch.device("cpu"))
    for name, able in {"sm_80": False, "sm_89": True, "sm_90": True, "gfx942": False}.items():
        monkeypatch.setattr(triton_targets, "current", lambda name=name: triton_targets.TARGETS[name])
        if able:
            check_fp8_device(torch.device("cuda"))
        else:
            with pytest.raises(ValueError, match=rf"need a GPU that has e4m3 \(sm_89, .*counts as {name}"):
                check_fp8_device(torch.device("cuda"))
