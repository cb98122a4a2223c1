"""A decoder whose layers' products run in e4m3: close to the float one, equal in any chunks, smaller, its head in the
model's precision; and what devices without e4m3 are told."""

import pytest
import torch
from quantized_checkpoints import write_checkpoint
from tiny_models import Runner, make_hf_model, save

from batchinfer.errors import UsageError
from batchinfer.models.linear import Fp8Linear, Linear, PackedLinear
from batchinfer.models.loader import load_decoder

IDS = torch.randint(0, 97, (50,), generator=torch.Generator().manual_seed(4))
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


def tiny():
    return make_hf_model("llama", **SIZES, num_key_value_heads=2, initializer_range=0.1)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("family", "fields"), [("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen3", {})])
def test_logits_are_close_to_those_of_floats(tmp_path, dtype, family, fields):
    path = save(make_hf_model(family, initializer_range=0.1, **fields), tmp_path)  # so small that attention is smooth
    exact = Runner(load_decoder(path, "fp32")).logits("a", IDS, [50])
    logits = Runner(load_decoder(path, dtype, activation_dtype="fp8")).logits("a", IDS, [50])
    error = (logits - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 5e-4 < error.mean() < 0.1  # each operand errs by about 2.6%


@pytest.mark.parametrize("cuts", [[1, 2, 3, 50], [13, 29, 50]])
def test_logits_are_equal_in_any_chunks(tmp_path, cuts):
    decoder = load_decoder(save(make_hf_model("llama"), tmp_path), "bf16", activation_dtype="fp8")
    assert torch.equal(Runner(decoder).logits("a", IDS, [50]), Runner(decoder).logits("a", IDS, cuts))


@pytest.mark.parametrize("form", ["awq", "fp8"])
def test_stored_numbers_are_kept(tmp_path, form):
    checkpoint = write_checkpoint(tmp_path / "a", tiny(), form)
    own = load_decoder(checkpoint.path, "fp32")
    decoder = load_decoder(checkpoint.path, "fp32", activation_dtype="fp8")
    layer = decoder._layers[1].mlp._gate_up
    assert isinstance(layer, Fp8Linear)
    assert isinstance(own._layers[1].mlp._gate_up, PackedLinear)
    assert decoder.weight_bytes == own.weight_bytes
    x = torch.zeros(2, 64)
    x[0, 3], x[1, 9] = 448.0, -0.5  # exact in e4m3 with the scales 1 and 2^-9 * 8 / 7
    torch.testing.assert_close(layer(x), own._layers[1].mlp._gate_up(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_keeps_the_models_precision_and_layers_a_byte_a_number(tmp_path, tied):
    path = save(make_hf_model("llama", tie_word_embeddings=tied), tmp_path)
    decoder, own = load_decoder(path, "fp32", activation_dtype="fp8"), load_decoder(path, "fp32")
    assert isinstance(decoder._lm_head, Linear)
    hidden = torch.randn(3, decoder.spec.hidden_size)
    assert torch.equal(decoder.compute_logits(hidden), own.compute_logits(hidden))
    width, kv, vocab, hidden_size = 56, 16, 97, 48  # a head is 8 wide
    linear = 2 * ((hidden_size + 2 * kv + hidden_size + 2 * width) * hidden_size + hidden_size * width)
    assert own.weight_bytes - decoder.weight_bytes > 2.3 * linear
    assert decoder.num_parameters == own.num_parameters
    assert decoder.weight_bytes > 4 * vocab * hidden_size * (1 if tied else 2)


def test_a_device_without_e4m3_is_told_what_to_do(tmp_path, monkeypatch):
    def refuse(device):
        raise ValueError("products in fp8 need a GPU that has e4m3 (sm_89), and this one counts as sm_80")

    monkeypatch.setattr("batchinfer.models.linear.check_fp8_device", refuse)
    path = save(make_hf_model("llama"), tmp_path)
    with pytest.raises(UsageError, match=r"--activation-dtype fp8: .* counts as sm_80; leave it at auto, or take int8"):
        load_decoder(path, "fp32", activation_dtype="fp8")
    assert load_decoder(path, "fp32", activation_dtype="int8").num_parameters > 0


def test_the_largest_scratch_of_layers_is_known(tmp_path, monkeypatch):
    """Which a GPU's form of a weight has."""
    path = write_checkpoint(tmp_path / "a", tiny(), "gptq", lm_head=True).path
    assert load_decoder(path, "fp32").scratch_bytes == 0

    def written_out(self, dtype):
        return self._weight.num_outputs * self._weight.num_inputs * dtype.itemsize

    monkeypatch.setattr(PackedLinear, "scratch_bytes", written_out)
    assert load_decoder(path, "bf16").scratch_bytes == 2 * (2 * 128) * 64  # gate and up; the head has 96 x 64
    assert load_decoder(path, "fp32", activation_dtype="fp8").scratch_bytes == 0


def test_what_was_decided_is_reported(tmp_path):
    lines: list[str] = []
    load_decoder(write_checkpoint(tmp_path / "a", tiny(), "awq").path, activation_dtype="fp8", report=lines.append)
    assert len(lines) == 1
    assert lines[0].endswith("activations fp8 with a scale a token, computed in float32 on a CPU")
