"""transformers, with GPTQModel or compressed-tensors, reads what is written here and gives the logits of our decoder.
Runs where these are installed."""

import importlib.util

import pytest
import torch
from other_tools import IDS, agree, cut_model, deviation, our_logits, plain_logits, unpacked

from batchinfer.conversion.options import QuantizeOptions
from batchinfer.conversion.quantize_job import quantize_model

pytestmark = pytest.mark.slow
# Format, and the plain torch backend's name, so that GPTQModel compiles nothing; its AWQ products are of 16 bits.
GPTQ_MODEL = [("gptq", "gptq_torch", 1e-4), ("awq", "torch_awq", 5e-3)]
COMPRESSED = [
    {"method": "awq", "group_size": 32},
    {"method": "gptq", "group_size": 64, "symmetric": True},
    {"method": "rtn", "bits": 8, "group_size": -1},
    {"method": "fp8"},
]


@pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is None, reason="needs GPTQModel")
@pytest.mark.parametrize(("written", "backend", "tolerance"), GPTQ_MODEL)
@torch.inference_mode()
def test_gptqmodel(smollm2, tmp_path, written, backend, tolerance):
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tmp_path / "out"
    quantize_model(str(smollm2), str(path), QuantizeOptions(method="rtn", format=written, group_size=64), print)
    config = AutoConfig.from_pretrained(path)
    config.quantization_config["backend"] = backend
    elsewhere = AutoModelForCausalLM.from_pretrained(path, config=config, device_map="cpu", dtype=torch.float32)
    assert "gptqmodel" in type(elsewhere.model.layers[0].mlp.down_proj).__module__
    found = elsewhere(IDS[None]).logits[0]
    assert deviation(found, plain_logits(smollm2, unpacked(path))) <= tolerance
    assert deviation(our_logits(path), found.float()) <= tolerance


@pytest.mark.skipif(importlib.util.find_spec("compressed_tensors") is None, reason="needs compressed-tensors")
@pytest.mark.parametrize("options", COMPRESSED, ids=lambda options: options["method"])
@torch.inference_mode()
def test_compressed_tensors(smollm2, tmp_path, options):
    """Its weights are those of our readers, and the logits of a model with them ours."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    path = tmp_path / "out"
    options = QuantizeOptions(format="compressed-tensors", calibration_samples=1, **options)
    quantize_model(str(cut_model(smollm2, tmp_path / "cut")), str(path), options, print)
    config = CompressedTensorsConfig(dequantize=True)
    elsewhere = AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype=torch.float32)
    state, ours = elsewhere.state_dict(), unpacked(path)
    assert len(ours) > 2 * 7
    assert agree(state, ours)
    assert deviation(our_logits(path), plain_logits(tmp_path / "cut", ours)) <= 1e-5
