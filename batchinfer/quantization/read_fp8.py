"""FP8 checkpoints: weights of e4m3 with a scale a tensor, a channel or a block. Chosen by config.parse; read_fp8 is
for compressed-tensors, too.

Activations stay in the model's precision, whatever activation scheme the config has: that is finer than what the file
asks for, and its static activation scales are left out.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.kernels.quantized_linear.stored import SCALE_DTYPES, Fp8Weight
from batchinfer.quantization.fields import QuantizationFields
from batchinfer.quantization.scheme import checked
from batchinfer.quantization.tensors import ModuleTensors

Block = tuple[int, int]
_SCALES = ("weight_scale_inv", "weight_scale")  # the former multiplies, too, despite its name
_SCALE_DTYPES = (*SCALE_DTYPES, torch.float8_e8m0fnu)
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """block: outputs and inputs that share a scale; None where a tensor or a channel does."""

    block: Block | None

    method = "fp8"

    @property
    def description(self) -> str:
        return "e4m3" if self.block is None else f"e4m3 in blocks of {self.block[0]} x {self.block[1]}"

    def is_quantized(self, tensors: ModuleTensors) -> bool:
        return holds_fp8(tensors)

    def read(self, tensors: ModuleTensors, num_outputs: int, num_inputs: int) -> Fp8Weight:
        return read_fp8(tensors, num_outputs, num_inputs, self.block)


def holds_fp8(tensors: ModuleTensors) -> bool:
    return any(tensors.has(name) for name in _SCALES) or tensors.dtype("weight") == torch.float8_e4m3fn


def read_fp8(tensors: ModuleTensors, num_outputs: int, num_inputs: int, block: Block | None) -> Fp8Weight:
    """block: as configured, or None. The shape of the scales says the rest."""
    values = tensors.take("weight", (torch.float8_e4m3fn,), (num_outputs, num_inputs))
    name = next((name for name in _SCALES if tensors.has(name)), "weight_scale")
    scales = _without_padding(tensors.take(name, _SCALE_DTYPES, None).to(torch.float32))
    grid = _grid(scales, num_outputs, num_inputs, block)
    if grid is None:
        blocks = "" if block is None else f", nor the grid of {block[0]} x {block[1]} blocks"
        raise tensors.fault(
            f"tensor {tensors.module}.{name} is {list(scales.shape)}, neither one scale nor one for each of "
            f"{num_outputs} channels{blocks}"
        )
    tensors.drop("input_scale", "activation_scale")
    return checked(tensors, lambda: Fp8Weight(values, *grid))


def _without_padding(scales: Tensor) -> Tensor:
    """ModelOpt writes the grid of blocks as [rows, 1, columns, 1]."""
    is_padded = scales.ndim == 4 and scales.shape[1] == scales.shape[3] == 1
    return scales[:, 0, :, 0].contiguous() if is_padded else scales


def _grid(scales: Tensor, num_outputs: int, num_inputs: int, block: Block | None) -> tuple[Tensor, Block] | None:
    if block is not None:
        height, width = min(block[0], num_outputs), min(block[1], num_inputs)
        if scales.shape == (-(-num_outputs // height), -(-num_inputs // width)):
            return scales, (height, width)
    if scales.numel() == 1:
        return scales.view(1, 1), (num_outputs, num_inputs)
    if scales.shape in ((num_outputs,), (num_outputs, 1)):
        return scales.view(num_outputs, 1), (1, num_inputs)
    return None


def parse_fp8(fields: QuantizationFields) -> Fp8Scheme:
    """fields: of a quantization_config with quant_method fp8 or fbgemm_fp8."""
    size = fields.raw("weight_block_size")
    return Fp8Scheme(None if size is None else parse_block(fields, "weight_block_size", size))


def parse_modelopt(fields: QuantizationFields) -> Fp8Scheme:
    """fields: of ModelOpt's hf_quant_config.json, or of the quantization_config that it writes."""
    inner = fields.mapping("quantization") if fields.raw("quantization") else fields
    algorithm = inner.choice(inner.text("quant_algo").upper(), "quant_algo", _ALGORITHMS)
    size = inner.integer("group_size", default=128)
    return Fp8Scheme((size, size) if algorithm == "FP8_PB_WO" else None)


def parse_block(fields: QuantizationFields, name: str, value: object) -> Block:
    """Two sizes as [rows, columns], or as "128x128"."""
    if isinstance(value, str) and re.fullmatch(r"\d+x\d+", value):
        value = [int(size) for size in value.split("x")]
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise fields.error(name, value, "must be two sizes, rows and columns")
    return value[0], value[1]
