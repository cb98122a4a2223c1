"""transformers with GPTQModel reads what is written here and gives the logits of the same weights unpacked by our
readers. Runs where GPTQModel is installed."""

import importlib.util
import json

import pytest
import torch

from batchinfer.conversion.layer_tensors import Modules, shapes
from batchinfer.conversion.options import QuantizeOptions
from batchinfer.conversion.quantize_job import quantize_model
from batchinfer.models.checkpoint import SafetensorsCheckpoint
from batchinfer.models.families.common import WeightNames
from batchinfer.models.loader import load_spec
from batchinfer.quantization.config import parse
from batchinfer.quantization.tensors import ModuleTensors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is None, reason="needs GPTQModel"),
]
# Format, and the plain torch backend's name, so that GPTQModel compiles nothing; its AWQ products are of 16 bits.
CASES = [("gptq", "gptq_torch", 1e-4), ("awq", "torch_awq", 5e-3)]


def plain_model(original, quantized):
    """transformers' model of `original` in float32 with the weights and norms of `quantized`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    state, spec, names = model.state_dict(), load_spec(quantized), WeightNames()
    source = SafetensorsCheckpoint(quantized)
    config = json.loads((quantized / "config.json").read_text())["quantization_config"]
    scheme, unused = parse(config, "config.json"), set(source.names)
    for layer in range(spec.num_layers):
        for module, shape in shapes(spec, Modules.of(names)).items():
            name = names.layer.format(layer) + module
            stored = scheme.read(ModuleTensors(source, name, unused, torch.device("cpu")), *shape)
            state[f"{name}.weight"].copy_(stored.dequantize())
    for name in unused:
        state[name].copy_(source.read(name))
    return model


@pytest.mark.parametrize(("written", "backend", "tolerance"), CASES)
@torch.inference_mode()
def test_logits_are_those_of_the_unpacked_weights(smollm2, tmp_path, written, backend, tolerance):
    from transformers import AutoConfig, AutoModelForCausalLM

    options = QuantizeOptions(method="rtn", format=written, group_size=64)
    quantize_model(str(smollm2), str(tmp_path / "out"), options, print)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    config.quantization_config["backend"] = backend
    elsewhere = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", config=config, device_map="cpu", dtype=torch.float32
    )
    assert "gptqmodel" in type(elsewhere.model.layers[0].mlp.down_proj).__module__
    ids = torch.randint(0, 40_000, (1, 64), generator=torch.Generator().manual_seed(0))
    found = elsewhere(ids).logits.float()
    wanted = plain_model(smollm2, tmp_path / "out")(ids).logits
    assert (found - wanted).norm() <= tolerance * wanted.norm()
