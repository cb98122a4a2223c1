"""Checkpoints that GPTQModel and llm-compressor make of a cut of the default model load here, with the logits that
they have there. Runs where these are installed."""

import importlib.util
import os

import pytest
import torch
from other_tools import IDS, TEXTS, agree, cut_model, deviation, our_logits, plain_logits, unpacked

pytestmark = pytest.mark.slow
GROUPS = {"bits": 4, "group_size": 64}
GPTQ_MODEL = {
    "gptq-symmetric": GROUPS | {"sym": True, "desc_act": False},
    "gptq-asymmetric": GROUPS | {"sym": False, "desc_act": False},
    "gptq-v2-act-order": GROUPS | {"sym": False, "desc_act": True, "format": "gptq_v2"},
    "gptq-rules": GROUPS | {"dynamic": {r"-:.*o_proj": {}, r"+:.*down_proj": {"bits": 8, "group_size": 32}}},
    "awq": GROUPS | {"method": "awq", "format": "gemm"},
}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
COMPRESSOR = {
    "w4a16": {"weights": INT4 | {"symmetric": True}},
    "w4a16-asymmetric": {"weights": INT4 | {"symmetric": False}},
    "w4a16-gptq": {"weights": INT4 | {"symmetric": True}, "actorder": "static"},
    "w8a16": {"weights": INT8},
    "fp8-dynamic": {"scheme": "FP8_DYNAMIC"},
    "fp8-block": {"scheme": "FP8_BLOCK"},
    "fp8-static-kv": {"scheme": "FP8", "kv_cache_scheme": KV},
}


@pytest.fixture(scope="module")
def cut(smollm2, tmp_path_factory):
    return cut_model(smollm2, tmp_path_factory.mktemp("cut"))


@pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is None, reason="needs GPTQModel")
@pytest.mark.parametrize("name", GPTQ_MODEL)
def test_gptqmodel(cut, tmp_path, name, monkeypatch):
    """Its weights, which it rounds to float16, are ours rounded so, and but for that its model's logits are those of
    our decoder. transformers cannot load rules."""
    monkeypatch.setitem(os.environ, "GPTQMODEL_CPU_WORKERS", "2")  # it asks itself for two
    from gptqmodel import GPTQModel, QuantizeConfig

    path = tmp_path / "out"
    model = GPTQModel.load(str(cut), QuantizeConfig(device="cpu", **GPTQ_MODEL[name]))
    model.quantize(TEXTS, batch_size=1)
    model.save(str(path))
    ours = unpacked(path)
    if name != "awq":
        check_weights(path, ours)
    if name != "gptq-rules":
        found = logits_by_gptqmodel(path)
        assert deviation(found, plain_logits(cut, ours)) <= 5e-4
        assert deviation(our_logits(path), found) <= 5e-4


def check_weights(path, ours):
    from gptqmodel import BACKEND, GPTQModel

    model = GPTQModel.load(str(path), device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16).model
    found = {name: m.dequantize_weight().T for name, m in model.named_modules() if hasattr(m, "dequantize_weight")}
    assert len(found) >= 12
    for name, weight in found.items():
        assert torch.equal(weight, ours[f"{name}.weight"].half()), name


@torch.inference_mode()
def logits_by_gptqmodel(path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    is_awq = config.quantization_config["quant_method"] == "awq"
    config.quantization_config["backend"] = "torch_awq" if is_awq else "gptq_torch"
    model = AutoModelForCausalLM.from_pretrained(path, config=config, device_map="cpu", dtype=torch.float32)
    assert "gptqmodel" in type(model.model.layers[0].mlp.down_proj).__module__
    return model(IDS[None]).logits[0].float()


@pytest.mark.skipif(importlib.util.find_spec("llmcompressor") is None, reason="needs llm-compressor")
@pytest.mark.parametrize("name", COMPRESSOR)
@torch.inference_mode()
def test_llm_compressor(cut, tmp_path, name):
    """What compressed-tensors decompresses is what our readers mean."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    compress(cut, tmp_path / "out", **COMPRESSOR[name])
    config = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=config, dtype=torch.float32)
    state, ours = model.state_dict(), unpacked(tmp_path / "out")
    assert sum("proj" in weight for weight in ours) == 2 * 7
    assert agree(state, ours)
    assert deviation(our_logits(tmp_path / "out"), plain_logits(cut, ours)) <= 1e-5


def compress(original, path, weights=None, actorder=None, **options):
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options |= {"ignore": ["lm_head"]}
    options |= (
        {"targets": "Linear"}
        if weights is None
        else {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    )
    recipe = QuantizationModifier(**options) if actorder is None else GPTQModifier(actorder=actorder, **options)
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(original)
    with torch.inference_mode(False):
        texts = Dataset.from_list([dict(tokenizer(text)) for text in TEXTS])
        oneshot(model=model, recipe=recipe, tokenizer=tokenizer, dataset=texts, num_calibration_samples=len(TEXTS))
    model.save_pretrained(path, save_compressed=True)
