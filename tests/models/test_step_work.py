"""What a step reads and computes, against torch's own count for Hugging Face's model, and the tensors of a decoder."""

import pytest
import torch
from tiny_models import make_hf_model, save
from torch.utils.flop_counter import FlopCounterMode

from batchinfer.models.loader import load_decoder
from batchinfer.models.step_work import step_work

TOKENS = 11


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 20}),
        ("qwen2", {"num_key_value_heads": 1}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_work_equals_torch_s_count(tmp_path, model_type, fields):
    model = make_hf_model(model_type, **fields)
    decoder = load_decoder(save(model, tmp_path), "fp32", "cpu")
    work = step_work(decoder, decoder.kv_cache_spec(4))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(TOKENS)[None])
    # Hugging Face computes every pair of a query and a key, and masks half of them.
    own = TOKENS * (work.linear_flops_per_token + work.logits_flops_per_token)
    assert own + TOKENS**2 * work.attention_flops_per_pair == counter.get_total_flops()
    parameters = {name: tensor.nbytes for name, tensor in model.named_parameters()}
    if not fields.get("tie_word_embeddings"):
        del parameters["model.embed_tokens.weight"]
    assert work.weight_bytes == sum(parameters.values())
    assert work.dtype == "fp32"


def test_cached_tokens_are_counted_with_their_scales(tmp_path):
    """Two layers of two heads of 8 numbers: keys and values, and a float32 scale for each head of both."""
    decoder = load_decoder(save(make_hf_model("llama"), tmp_path), "bf16", "cpu")
    sizes = {dtype: step_work(decoder, decoder.kv_cache_spec(4, dtype)).kv_bytes_per_token for dtype in ("auto", "fp8")}
    assert sizes == {"auto": 2 * 2 * 2 * 8 * 2, "fp8": 2 * 2 * 2 * (8 + 4)}
    assert step_work(decoder, decoder.kv_cache_spec(4, "fp8")).dtype == "bf16"
