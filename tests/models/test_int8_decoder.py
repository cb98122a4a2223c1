"""A decoder whose products run in 8 bits: close to the float one, equal in any chunks, and smaller."""

import pytest
import torch
from tiny_models import Runner, make_hf_model, save

from batchinfer.models.loader import load_decoder

IDS = torch.randint(0, 97, (50,), generator=torch.Generator().manual_seed(4))


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
    logits = Runner(load_decoder(path, dtype, activation_dtype="int8")).logits("a", IDS, [50])
    error = (logits - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 1e-4 < error.mean() < 0.03  # each product errs by about 0.6%


@pytest.mark.parametrize("cuts", [[1, 2, 3, 50], [13, 29, 50], [49, 50]])
def test_logits_are_equal_in_any_chunks(tmp_path, cuts):
    decoder = load_decoder(save(make_hf_model("llama"), tmp_path), "bf16", activation_dtype="int8")
    assert torch.equal(Runner(decoder).logits("a", IDS, [50]), Runner(decoder).logits("a", IDS, cuts))


def test_logits_do_not_depend_on_other_rows(tmp_path):
    decoder = load_decoder(save(make_hf_model("llama"), tmp_path), "bf16", activation_dtype="int8")
    hidden = torch.randn(30, decoder.spec.hidden_size).bfloat16()
    assert torch.equal(decoder.compute_logits(hidden[7:8]), decoder.compute_logits(hidden)[7:8])


@pytest.mark.parametrize("tied", [False, True])
def test_floats_of_quantised_layers_do_not_count(tmp_path, tied):
    path = save(make_hf_model("llama", tie_word_embeddings=tied), tmp_path)
    decoder = load_decoder(path, "bf16", activation_dtype="int8")
    vocab, hidden, width, kv = 97, 48, 56, 16  # a head is 8 wide; one group of 64 inputs everywhere
    outputs = [hidden + 2 * kv, hidden, 2 * width, hidden] * 2 + [vocab]
    blocks = sum(-(-size // 32) for size in outputs)
    floats = vocab * hidden + 5 * hidden  # the embedding and the norms
    assert decoder.weight_bytes == 2 * floats + blocks * 32 * (64 + 4 + 4)
    assert decoder.num_parameters == load_decoder(path, "bf16").num_parameters
