"""GGUF files run in their own blocks: the same numbers as the file's dequantised weights."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from test_gguf import (
    SIZES,
    byte_level_keys,
    finish,
    gguf_name,
    make_model,
    permute,
    start_writer,
    write_model,
)
from tiny_models import Runner
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config

from batchinfer.errors import BatchInferError, UsageError
from batchinfer.models.gguf_conversion import convert_gguf
from batchinfer.models.linear import PackedLinear, SideBySide
from batchinfer.models.loader import load_decoder

IDS = torch.arange(7, 7 + 24) * 5 % SIZES["vocab_size"]
LAYER = "model.layers.0."


def convert(path: Path, packed: bool) -> Path:
    directory = path.with_suffix(".packed" if packed else ".floats")
    directory.mkdir()
    convert_gguf(path, directory, packed)
    return directory


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
@pytest.mark.parametrize(("config_class", "tied"), [(LlamaConfig, True), (LlamaConfig, False), (Qwen2Config, True)])
def test_logits_are_those_of_the_file_s_numbers(config_class, tied, kind, tmp_path):
    model = make_model(config_class, tie_word_embeddings=tied)
    write_model(tmp_path / "tiny.gguf", model, kind)  # leaves the file's numbers in the model
    path = convert(tmp_path / "tiny.gguf", packed=True)
    decoder = load_decoder(path, "fp32", quantization="gguf")
    assert isinstance(decoder._layers[0].attention._qkv, PackedLinear)
    assert isinstance(decoder._lm_head, PackedLinear)
    ours = Runner(decoder).logits("a", IDS, [24])
    with torch.inference_mode():
        torch.testing.assert_close(ours, model(IDS[None]).logits[0], rtol=1e-3, atol=1e-3)
    floats = load_decoder(convert(tmp_path / "tiny.gguf", packed=False), "fp32")
    assert decoder.num_parameters == floats.num_parameters
    assert decoder.weight_bytes < floats.weight_bytes


def write_mixed(path: Path, model: PreTrainedModel) -> None:
    """As llama.cpp mixes its types: most of Q4_K, values, down and embedding of Q6_K; random blocks, which become the
    model's weights."""
    random = np.random.default_rng(0)
    writer = start_writer(path, model.config)
    byte_level_keys(writer, "smollm")
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            writer.add_tensor(gguf_name(name), parameter.detach().numpy())
            continue
        kind = Kind.Q6_K if any(part in name for part in ("v_proj", "down_proj", "embed")) else Kind.Q4_K
        rows = random_blocks(random, parameter.shape, kind)
        parameter.data = torch.from_numpy(np.array(dequantize(rows, kind)))
        part = next((part for part in heads if f".{part}." in name), None)
        if part is not None:
            rows = permute(rows, heads[part])
        writer.add_tensor(gguf_name(name), rows, raw_dtype=kind)
    finish(writer)


def random_blocks(random: np.random.Generator, shape: torch.Size, kind: Kind) -> np.ndarray:
    num_weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = random.integers(0, 256, (shape[0], shape[1] // num_weights, num_bytes), dtype=np.uint8)
    scale = random.uniform(0.5, 1, rows.shape[:2]) * (2e-4 if kind is Kind.Q4_K else 5e-5)
    start = 0 if kind is Kind.Q4_K else 208
    rows[..., start : start + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    if kind is Kind.Q4_K:
        rows[..., 2:4] = (7.5 * scale).astype(np.float16)[..., None].view(np.uint8)
    return rows.reshape(shape[0], -1)


def test_blocks_of_two_types_in_a_layer(tmp_path):
    model = make_model(LlamaConfig, hidden_size=256, intermediate_size=256, tie_word_embeddings=True)
    write_mixed(tmp_path / "tiny.gguf", model)
    path = convert(tmp_path / "tiny.gguf", packed=True)
    decoder = load_decoder(path, "fp32")
    assert isinstance(decoder._layers[0].attention._qkv, SideBySide)  # queries and keys of Q4_K, values of Q6_K
    assert isinstance(decoder._layers[0].mlp._gate_up, PackedLinear)
    ours = Runner(decoder).logits("a", IDS, [24])
    assert ours.std() > 0.01
    with torch.inference_mode():
        torch.testing.assert_close(ours, model(IDS[None]).logits[0], rtol=1e-3, atol=1e-3)


def test_the_file_holds_the_blocks_as_they_were(tmp_path):
    model = make_model(LlamaConfig, tie_word_embeddings=False)
    write_model(tmp_path / "tiny.gguf", model, Kind.Q4_1)
    path = convert(tmp_path / "tiny.gguf", packed=True)
    tensors = load_file(path / "model.safetensors")
    down = model.get_parameter(f"{LAYER}mlp.down_proj.weight").detach().numpy()
    assert np.array_equal(tensors[f"{LAYER}mlp.down_proj.weight_blocks"].numpy(), quantize(down, Kind.Q4_1))
    assert tensors[f"{LAYER}input_layernorm.weight"].dtype == torch.float32  # as in the file
    types = json.loads((path / "config.json").read_text())["quantization_config"]["types"]
    assert set(types.values()) == {"Q4_1"}
    assert len(types) == 2 + 7 * SIZES["num_hidden_layers"]


def test_types_that_do_not_run_as_they_are_are_refused(tmp_path):
    write_model(tmp_path / "tiny.gguf", make_model(LlamaConfig), Kind.Q5_0)
    with pytest.raises(BatchInferError, match=r"type Q5_0 does not run as it is \(Q4_0, Q4_1, Q8_0, Q4_K, Q6_K do\)"):
        convert(tmp_path / "tiny.gguf", packed=True)


def test_floats_have_no_blocks(tmp_path):
    write_model(tmp_path / "tiny.gguf", make_model(LlamaConfig), Kind.F32)
    path = convert(tmp_path / "tiny.gguf", packed=True)
    load_decoder(path)
    with pytest.raises(UsageError, match=r"--quantization gguf: the checkpoint .* is not quantised"):
        load_decoder(path, quantization="gguf")


@pytest.mark.parametrize("change", ["shorter", "unnamed"])
def test_broken_blocks_are_named(change, tmp_path):
    write_model(tmp_path / "tiny.gguf", make_model(LlamaConfig), Kind.Q8_0)
    path = convert(tmp_path / "tiny.gguf", packed=True)
    if change == "shorter":
        tensors = load_file(path / "model.safetensors")
        name = f"{LAYER}mlp.up_proj.weight_blocks"
        save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, path / "model.safetensors", {"format": "pt"})
    else:
        config = json.loads((path / "config.json").read_text())
        del config["quantization_config"]["types"][f"{LAYER}mlp.up_proj"]
        (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BatchInferError, match=r"model\.layers\.0\.mlp\.up_proj"):
        load_decoder(path)
