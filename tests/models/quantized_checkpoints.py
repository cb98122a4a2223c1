"""Tiny models as quantised checkpoints: rounded to a grid here, and written in a format bit by bit."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import written_formats as formats
from safetensors.torch import save_file
from torch import Tensor

GROUP = 32
Tensors = dict[str, Tensor]
Layer = tuple[Tensors, Tensor]  # as stored, and as meant


@dataclass(frozen=True)
class Written:
    """path: the checkpoint. dequantized: the model with the weights that it means. weights: those by layer."""

    path: Path
    dequantized: Any
    weights: Tensors


def write_checkpoint(path: Path, model: Any, form: str, skip: tuple[str, ...] = (), lm_head: bool = False) -> Written:
    """form: of FORMATS. skip: layers that stay floats. `model` gets the rounded weights; with lm_head the file's head
    is quantised and the model's is not."""
    write, config = FORMATS[form]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    weights = {}
    for name in names:
        if name in skip or (name == "lm_head" and not lm_head):
            continue
        weight = model.get_submodule(name).weight
        tensors, meant = write(name, weight.detach())
        weights[name] = meant
        if name != "lm_head":
            weight.data = meant
        state.pop(f"{name}.weight", None)
        state |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
    model.save_pretrained(path)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    stored = json.loads((path / "config.json").read_text()) | {"quantization_config": config}
    (path / "config.json").write_text(json.dumps(stored))
    return Written(path, model, weights)


def _round(weight: Tensor, bits: int, order: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Integers, fp16 scales and whole zeros of the nearest grid, the inputs in groups by `order`."""
    groups = max(order) + 1
    members = [[k for k, group in enumerate(order) if group == g] for g in range(groups)]
    low = torch.stack([weight[:, m].amin(1) for m in members], 1).clamp(max=0)
    high = torch.stack([weight[:, m].amax(1) for m in members], 1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = (-low / scales.float()).round().clamp(0, 2**bits - 1).int()
    values = (weight / scales.float()[:, order] + zeros[:, order]).round().clamp(0, 2**bits - 1).int()
    return values, scales, zeros


def _order(num_inputs: int, act_order: bool = False) -> list[int]:
    order = [k // GROUP for k in range(num_inputs)]
    if not act_order:
        return order
    places = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs)).tolist()
    return [order[place] for place in places]


def _awq(name: str, weight: Tensor) -> Layer:
    order = _order(weight.shape[1])
    parts = _round(weight, 4, order)
    return formats.awq_gemm(*parts), formats.dequantize(*parts, order)


def _gptq(bits: int = 4, act_order: bool = False, v1: bool = True) -> Callable[[str, Tensor], Layer]:
    def write(name: str, weight: Tensor) -> Layer:
        order = _order(weight.shape[1], act_order)
        parts = _round(weight, bits, order)
        return formats.gptq(*parts, bits, order, v1), formats.dequantize(*parts, order)

    return write


def _gptq_rules(name: str, weight: Tensor) -> Layer:
    return _gptq(8 if name.endswith(("v_proj", "up_proj")) else 4)(name, weight)


def _compressed(symmetric: bool) -> Callable[[str, Tensor], Layer]:
    def write(name: str, weight: Tensor) -> Layer:
        order = _order(weight.shape[1])
        values, scales, zeros = _round(weight, 4, order)
        zeros = torch.full_like(zeros, 8) if symmetric else zeros
        tensors = formats.compressed_tensors(values, scales, None if symmetric else zeros, 4)
        return tensors, formats.dequantize(values, scales, zeros, order)

    return write


def _fp8(shape: str) -> Callable[[str, Tensor], Layer]:
    def write(name: str, weight: Tensor) -> Layer:
        rows = weight.abs() if shape == "channel" else weight.abs().max().view(1, 1)
        scales = rows.amax(1, keepdim=True) / 448
        values = (weight / scales).to(torch.float8_e4m3fn)
        stored = scales if shape == "channel" else scales.squeeze()
        tensors = {"weight": values, "weight_scale": stored, "input_scale": torch.ones(())}
        return tensors, values.float() * scales

    return write


def _fp8_blocks(name: str, weight: Tensor) -> Layer:
    """Blocks of 48 x 48, which end within the layers."""
    grid = torch.rand(-(-weight.shape[0] // 48), -(-weight.shape[1] // 48)) * 0.01 + 0.005
    spread = grid.repeat_interleave(48, 0)[: weight.shape[0]].repeat_interleave(48, 1)[:, : weight.shape[1]]
    values = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": grid}, values.float() * spread


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
_RULES = {r"-:lm_head": {}, r".*\.(v|up)_proj": {"bits": 8}}


def _groups(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


_INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": GROUP}
FORMATS: dict[str, tuple[Callable[[str, Tensor], Layer], dict[str, Any]]] = {
    "awq": (_awq, _AWQ),
    "gptq": (_gptq(), _GPTQ),
    "gptq-3-bits": (_gptq(bits=3), _GPTQ | {"bits": 3}),
    "gptq-v2": (_gptq(v1=False), _GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq-act-order": (_gptq(act_order=True), _GPTQ | {"desc_act": True}),
    "compressed-tensors": (_compressed(True), _groups("pack-quantized", symmetric=True, **_INT4)),
    "compressed-tensors-asymmetric": (_compressed(False), _groups("pack-quantized", symmetric=False, **_INT4)),
    "compressed-tensors-fp8": (
        _fp8("channel"),
        _groups("float-quantized", type="float", num_bits=8, strategy="channel", symmetric=True),
    ),
    "fp8": (_fp8("tensor"), {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8-blocks": (_fp8_blocks, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 48]}),
    "modelopt": (_fp8("tensor"), {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}),
    "gptq-rules": (_gptq_rules, _GPTQ | {"dynamic": _RULES}),
}
