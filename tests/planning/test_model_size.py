"""Weights' sizes from the heads of files against what loading them takes."""

import json
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import write_checkpoint
from tiny_models import make_hf_model, save

from batchinfer.errors import BatchInferError
from batchinfer.models.linear import PackedLinear
from batchinfer.models.loader import load_decoder, load_scheme, load_spec
from batchinfer.planning.model_size import WeightForm, WeightSizes, read_heads, weight_sizes

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
FORMS = ["awq", "gptq", "compressed-tensors", "compressed-tensors-fp8", "fp8", "fp8-blocks", "modelopt"]


def forecast(path: Path, dtype: str, activation_dtype: str = "auto") -> WeightSizes:
    packs = dtype == "bf16" and PackedLinear.is_best_for(torch.empty(1, 1, dtype=torch.bfloat16))
    types = getattr(load_scheme(path), "types", {})
    form = WeightForm(dtype, activation_dtype == "int8", packs, types, activation_dtype == "fp8")
    return weight_sizes(read_heads(path), load_spec(path), form)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("dtype", "activation_dtype"), [("fp32", "auto"), ("bf16", "auto"), ("bf16", "int8"), ("bf16", "fp8")]
)
def test_weights_take_what_loading_them_takes(tmp_path: Path, tied: bool, dtype: str, activation_dtype: str) -> None:
    path = save(make_hf_model("qwen2", tie_word_embeddings=tied, vocab_size=256, **SIZES), tmp_path)  # with biases
    loaded = load_decoder(path, dtype, activation_dtype=activation_dtype)
    found = forecast(path, dtype, activation_dtype)
    assert found.total == pytest.approx(loaded.weight_bytes, rel=0.01)
    assert found.linear + found.head == pytest.approx(loaded.step_weight_bytes, rel=0.03)  # norms are read, too


@pytest.mark.parametrize("form", FORMS)
def test_quantised_weights_take_what_loading_them_takes(tmp_path: Path, form: str) -> None:
    write_checkpoint(tmp_path, make_hf_model("llama", **SIZES), form)
    assert forecast(tmp_path, "bf16").total == pytest.approx(load_decoder(tmp_path, "bf16").weight_bytes, rel=0.05)


def test_no_tensor_is_needed(tmp_path: Path) -> None:
    path = save(make_hf_model("llama", **SIZES), tmp_path)
    whole = forecast(path, "bf16")
    file = path / "model.safetensors"
    length = int.from_bytes(file.read_bytes()[:8], "little")
    file.write_bytes(file.read_bytes()[: 8 + length])
    assert forecast(path, "bf16") == whole


def test_shards_of_an_index_add_up(tmp_path: Path) -> None:
    model = make_hf_model("llama", **SIZES)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="500KB")
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert forecast(tmp_path / "shards", "bf16") == forecast(tmp_path / "whole", "bf16")


@pytest.mark.parametrize("content", [b"", b'\x09\0\0\0\0\0\0\0{"a"', b"\xff" * 20])
def test_a_file_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(BatchInferError, match=r"model\.safetensors: not a readable safetensors file"):
        read_heads(tmp_path)
