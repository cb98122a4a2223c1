"""Whole tiny models whose layers compute gate, up and activation at once: the bits of logits are those of models whose
weights lie in their own order, with the activation after the product."""

import pytest
import torch
from batchinfer.kernels.quantized_linear import pack_weight, quantize_weight
from quantized_checkpoints import FORMATS, write_checkpoint
from tiny_models import Runner, make_hf_model, save

from batchinfer.models import linear
from batchinfer.models.linear import Int8Linear, PackedLinear
from batchinfer.models.loader import load_decoder

IDS = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(4))
SIZES = {"vocab_size": 96, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
FORMS = [form for form in FORMATS if form != "gptq-rules"]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load_both(monkeypatch, path, **options):
    """The decoder, and the same with weights in their own order."""
    fused = load_decoder(path, **options)
    with monkeypatch.context() as patch:
        patch.setattr(linear, "pack_weight", lambda weight, is_gated: pack_weight(weight))
        patch.setattr(linear, "quantize_weight", lambda weight, is_gated: quantize_weight(weight))
        ordered = load_decoder(path, **options)
    assert not ordered._layers[0].mlp._gate_up.can_gate
    assert ordered.weight_bytes == fused.weight_bytes
    return fused, ordered


def logits(decoder, cuts):
    """Some steps of a few rows, which other code computes than many."""
    return Runner(decoder).logits("a", IDS, cuts)


def check(monkeypatch, path, kind, **options):
    fused, ordered = load_both(monkeypatch, path, **options)
    layer = fused._layers[1].mlp._gate_up
    assert isinstance(layer, kind)
    assert layer.can_gate
    expected = logits(ordered, [40])
    assert expected.isfinite().all()
    for cuts in ([40], [1, 2, 5, 16, 40]):
        assert torch.equal(logits(fused, cuts), expected)


@pytest.mark.parametrize("activation_dtype", ["auto", "int8"])
@pytest.mark.parametrize("form", FORMS)
def test_quantised_checkpoints(tmp_path, monkeypatch, form, activation_dtype):
    model = make_hf_model("llama", intermediate_size=128, initializer_range=0.1, **SIZES)
    path = write_checkpoint(tmp_path / form, model, form, ()).path
    kind = PackedLinear if activation_dtype == "auto" else Int8Linear
    check(monkeypatch, path, kind, dtype="bf16", activation_dtype=activation_dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
def test_int8_of_floats_with_biases(tmp_path, monkeypatch, dtype, activation):
    fields = {"attention_bias": True, "mlp_bias": True, "hidden_act": activation, "intermediate_size": 80}
    path = save(make_hf_model("llama", **SIZES, **fields), tmp_path)
    check(monkeypatch, path, Int8Linear, dtype=dtype, activation_dtype="int8")


@pytest.mark.skipif(not PackedLinear.is_best_for(torch.zeros(1, 1).bfloat16()), reason="needs instructions for bf16")
def test_bf16_with_biases(tmp_path, monkeypatch):
    path = save(make_hf_model("llama", mlp_bias=True, intermediate_size=80, **SIZES), tmp_path)
    check(monkeypatch, path, PackedLinear, dtype="bf16")


@pytest.mark.parametrize("activation_dtype", ["auto", "int8"])
def test_widths_that_fill_no_blocks(tmp_path, activation_dtype):
    path = save(make_hf_model("llama", intermediate_size=56, **SIZES), tmp_path)
    decoder = load_decoder(path, "bf16", activation_dtype=activation_dtype)
    assert not getattr(decoder._layers[0].mlp._gate_up, "can_gate", False)
    exact = logits(load_decoder(path, "fp32"), [40])
    assert (logits(decoder, [40]) - exact).norm() < 0.2 * exact.norm()
