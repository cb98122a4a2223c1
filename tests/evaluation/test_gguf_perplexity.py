"""The default model's Q4_1 file, run in its own blocks, scores as the numbers that gguf dequantises from it."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from batchinfer.cli import main as command_line
from batchinfer.models.resolve import resolve_model

EVALUATION_TEXT = Path(__file__).resolve().parents[3] / "shared" / "bench" / "evaluation_text.parquet"
BESIDE = ("tokenizer.json", "tokenizer_config.json")


def write_dequantized(packed: Path, path: Path) -> Path:
    """The model in float32, without a trace of its blocks."""
    path.mkdir()
    config = json.loads((packed / "config.json").read_text())
    types = config.pop("quantization_config")["types"]
    assert "Q4_1" in types.values()
    tensors = {}
    for name, tensor in load_file(packed / "model.safetensors").items():
        module = name.removesuffix(".weight_blocks")
        if module != name:
            floats = dequantize(tensor.numpy(), gguf.GGMLQuantizationType[types[module]])
            tensors[f"{module}.weight"] = torch.from_numpy(np.array(floats, dtype=np.float32))
        else:
            tensors[name] = tensor.float()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    for name in BESIDE:
        (path / name).write_bytes((packed / name).read_bytes())
    return path


@pytest.mark.slow
@pytest.mark.skipif(not EVALUATION_TEXT.exists(), reason="needs the workload evaluation_text.parquet")
def test_q4_1_as_it_is_equals_its_dequantised_self(tmp_path):
    packed = resolve_model(None, print, "gguf").path
    floats = write_dequantized(packed, tmp_path / "floats")
    options = ["--model", packed, "--quantization", "gguf", "--dtype", "fp32", "--against", floats, "--limit", 3]
    options += ["--text", EVALUATION_TEXT, "--greedy-prompts", 2, "--greedy-tokens", 16, "--json", tmp_path / "f.json"]
    assert command_line._run(["evaluate", *map(str, options)]) == 0
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["tokens"] > 1000
    assert found["perplexity"] == pytest.approx(found["against_perplexity"], rel=1e-6)
    assert found["kl_divergence_max"] < 1e-6
    assert found["top1_agreement"] > 0.999
    assert found["greedy_agreement_tokens"] == 16
