"""What tests share that hold checkpoints against other tools: a small real model, and logits by them and by us."""

import json
from pathlib import Path

import torch
from tiny_models import Runner
from torch import Tensor

from batchinfer.conversion.layer_tensors import Modules, shapes
from batchinfer.models.checkpoint import SafetensorsCheckpoint
from batchinfer.models.families.common import WeightNames
from batchinfer.models.loader import load_decoder, load_spec
from batchinfer.quantization.config import parse
from batchinfer.quantization.tensors import ModuleTensors

IDS = torch.randint(0, 40_000, (64,), generator=torch.Generator().manual_seed(0))
TEXTS = [
    f"Text {number}: the ferry left the island at a quarter past {number}, because the captain waited for the post, "
    "and nobody on the pier minded, as the evening was warm and the sea lay still under the last light of the day."
    for number in range(12)
]


def cut_model(original: Path, path: Path, num_layers: int = 2) -> Path:
    """The first layers of a model, with its embedding, head and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(original).save_pretrained(path)
    return path


@torch.inference_mode()
def our_logits(path: Path) -> Tensor:
    """In float32, by the decoder that runs the checkpoint's packed weights."""
    decoder = load_decoder(path, "fp32")
    return Runner(decoder, block_size=16).logits("a", IDS, [len(IDS)])


@torch.inference_mode()
def plain_logits(original: Path, weights: dict[str, Tensor]) -> Tensor:
    """By transformers in float32: the model `original` with other weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    state = model.state_dict()
    for name, weight in weights.items():
        state[name].copy_(weight)
    return model(IDS[None]).logits[0]


def unpacked(path: Path) -> dict[str, Tensor]:
    """All weights of a quantised checkpoint as our readers mean them, KV scales aside."""
    spec, names, source = load_spec(path), WeightNames(), SafetensorsCheckpoint(path)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    scheme, unused = parse(config, "config.json"), set(source.names)
    weights = {}
    for layer in range(spec.num_layers):
        for module, shape in shapes(spec, Modules.of(names)).items():
            name = names.layer.format(layer) + module
            tensors = ModuleTensors(source, name, unused, torch.device("cpu"))
            if scheme.is_quantized(tensors):
                weights[f"{name}.weight"] = scheme.read(tensors, *shape).dequantize()
    return weights | {name: source.read(name) for name in unused if not name.endswith(("k_scale", "v_scale"))}


def agree(found: dict[str, Tensor], ours: dict[str, Tensor]) -> bool:
    """Whether all our weights are the same elsewhere, bit for bit, or as bf16 holds them: transformers 5.24 computes
    them in the precision of the scales."""
    exact, rounded = (
        all(torch.equal(found[name].float(), weight.to(dtype).float()) for name, weight in ours.items())
        for dtype in (torch.float32, torch.bfloat16)
    )
    return exact or rounded


def deviation(found: Tensor, wanted: Tensor) -> float:
    assert wanted.isfinite().all()
    return float((found.float() - wanted).norm() / wanted.norm())
