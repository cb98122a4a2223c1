"""compressed-tensors checkpoints: packed integers of 2, 3, 4 and 8 bits, and e4m3. Chosen by config.parse.

Layout: compressed-tensors, compressors/pack_quantized and compressors/naive_quantized.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchinfer.kernels.quantized_linear.stored import BITS, SCALE_DTYPES, IntegerWeight
from batchinfer.quantization.fields import QuantizationFields
from batchinfer.quantization.read_fp8 import Block, holds_fp8, parse_block, read_fp8
from batchinfer.quantization.scheme import Stored, checked
from batchinfer.quantization.tensors import ModuleTensors
from batchinfer.quantization.unpacking import group_order, unpack

_PACKED = "pack-quantized"
_FORMATS = (_PACKED, "float-quantized", "naive-quantized")
_CLASS = "Linear"  # what all layers here are in the model's own code


@dataclass(frozen=True, slots=True)
class _Group:
    """The layers that `targets` name, and how their weights are stored. group_size None: a scale a channel or tensor.
    block: of e4m3 weights, where they have blocks."""

    targets: tuple[str, ...]
    is_float: bool
    bits: int
    is_symmetric: bool
    group_size: int | None
    block: Block | None

    @property
    def description(self) -> str:
        if self.is_float:
            return "e4m3" if self.block is None else f"e4m3 in blocks of {self.block[0]} x {self.block[1]}"
        return f"{self.bits} bits in groups of {self.group_size or 'all'} inputs"


@dataclass(frozen=True, slots=True)
class CompressedTensorsScheme:
    """ignore: layers that the config lists as 16-bit."""

    groups: tuple[_Group, ...]
    ignore: tuple[str, ...]

    method = "compressed-tensors"

    @property
    def description(self) -> str:
        return " and ".join(dict.fromkeys(group.description for group in self.groups)) or "KV scales alone"

    def is_quantized(self, tensors: ModuleTensors) -> bool:
        if tensors.has("weight") and tensors.has("weight_packed") and _fit(self.ignore, tensors.module):
            return False
        return tensors.has("weight_packed") or holds_fp8(tensors)

    def read(self, tensors: ModuleTensors, num_outputs: int, num_inputs: int) -> Stored:
        group = self._group(tensors)
        if group.is_float:
            return read_fp8(tensors, num_outputs, num_inputs, group.block)
        return _read_packed(tensors, num_outputs, num_inputs, group)

    def _group(self, tensors: ModuleTensors) -> _Group:
        """The nearest target wins: a name before a pattern, and that before the class."""
        for rank in (3, 2, 1):
            for group in self.groups:
                if _fit(group.targets, tensors.module) == rank:
                    return group
        raise tensors.fault(f"{tensors.module} is stored quantised, but config_groups have no target for it")


def _fit(targets: Sequence[str], module: str) -> int:
    """How near the best of `targets` comes: 3 by name, 2 by pattern, 1 by class, 0 not."""
    if module in targets:
        return 3
    if any(target.startswith("re:") and re.match(target[3:], module) for target in targets):
        return 2
    return int(_CLASS in targets)


def _read_packed(tensors: ModuleTensors, num_outputs: int, num_inputs: int, group: _Group) -> IntegerWeight:
    bits = group.bits
    group_size = min(group.group_size or num_inputs, num_inputs)
    num_groups = -(-num_inputs // group_size)
    packed = tensors.take("weight_packed", (torch.int32,), (num_outputs, -(-num_inputs * bits // 32)))
    scales = tensors.take("weight_scale", SCALE_DTYPES, None)
    shape: tuple[int, int] = (num_outputs, num_groups)
    if scales.numel() == 1:
        scales = scales.view(1, 1).expand(shape).contiguous()
    if tuple(scales.shape) != shape:
        raise tensors.fault(f"tensor {tensors.module}.weight_scale is {list(scales.shape)}, not {list(shape)}")
    _check_shape(tensors, num_outputs, num_inputs)
    zeros = _zeros(tensors, shape, group)
    order = _order(tensors, num_inputs, group_size)
    values = unpack(packed, bits, num_inputs)
    values = values if order is None else values[:, order]
    return checked(tensors, lambda: IntegerWeight(bits, group_size, values, scales, zeros, None, order))


def _check_shape(tensors: ModuleTensors, num_outputs: int, num_inputs: int) -> None:
    if tensors.has("weight_shape"):
        stored = tensors.take("weight_shape", (torch.int64, torch.int32), (2,)).tolist()
        if stored != [num_outputs, num_inputs]:
            raise tensors.fault(f"tensor {tensors.module}.weight_shape is {stored}, not {[num_outputs, num_inputs]}")


def _zeros(tensors: ModuleTensors, shape: tuple[int, int], group: _Group) -> Tensor:
    """float32 [N, G]; zero points are packed along the outputs. What is stored is signed, less half the range."""
    half = 2 ** (group.bits - 1)
    if group.is_symmetric:
        tensors.drop("weight_zero_point")  # zeros, where older versions wrote them
        return torch.full(shape, float(half), device=tensors.device)
    words = -(-shape[0] * group.bits // 32)
    packed = tensors.take("weight_zero_point", (torch.int32,), (words, shape[1]))
    return unpack(packed.T, group.bits, shape[0]).T.to(torch.float32).contiguous()


def _order(tensors: ModuleTensors, num_inputs: int, group_size: int) -> Tensor | None:
    if not tensors.has("weight_g_idx"):
        return None
    g_idx = tensors.take("weight_g_idx", (torch.int32, torch.int64), (num_inputs,))
    if bool((g_idx == -1).all()):  # never filled in
        return None
    try:
        return group_order(g_idx, group_size)
    except ValueError as error:
        raise tensors.fault(f"tensor {tensors.module}.weight_g_idx {error}") from error


def parse_compressed_tensors(fields: QuantizationFields) -> CompressedTensorsScheme:
    """fields: of a quantization_config with quant_method compressed-tensors."""
    fields.refuse("transform_config")
    sparsity = fields.mapping("sparsity_config").raw("format", default="dense")
    fields.choice(sparsity, "sparsity_config.format", ("dense",))
    groups = fields.mapping("config_groups").items()
    if groups:
        fields.choice(fields.text("quantization_status", default="compressed"), "quantization_status", ("compressed",))
    elif not fields.raw("kv_cache_scheme"):
        raise fields.error("config_groups", {}, "names no quantised layers")
    ignore = fields.texts("ignore")
    for text in ignore:
        fields.pattern(text.removeprefix("re:"))
    return CompressedTensorsScheme(tuple(_parse_group(fields, name, value) for name, value in groups), ignore)


def _parse_group(fields: QuantizationFields, name: str, value: Any) -> _Group:
    if not isinstance(value, Mapping):
        raise fields.error(f"config_groups.{name}", value, "must be an object")
    group = QuantizationFields(value, f"{fields.where}.config_groups.{name}")
    targets = group.texts("targets")
    for text in targets:
        if text.startswith("re:"):
            group.pattern(text[3:])
    weights = group.mapping("weights")
    form = group.text("format", default=fields.text("format"))
    group.choice(form, "format", _FORMATS)
    is_float = weights.choice(weights.text("type", default="int").lower(), "type", ("int", "float")) == "float"
    bits = weights.integer("num_bits", default=8)
    weights.choice(bits, "num_bits", (8,) if is_float else BITS)
    if is_float == (form == _PACKED):
        raise group.error("format", form, f"does not hold weights of type {'float' if is_float else 'int'}")
    return _Group(targets, is_float, bits, weights.boolean("symmetric", True), *_strategy(weights, is_float))


def _strategy(weights: QuantizationFields, is_float: bool) -> tuple[int | None, Block | None]:
    """Group size and block."""
    size = weights.integer("group_size", default=-1)
    strategy = weights.text("strategy", default="channel" if size == -1 else "group").lower()
    allowed = ("tensor", "channel", "group", "block") if is_float else ("tensor", "channel", "group")
    weights.choice(strategy, "strategy", allowed)
    if strategy == "block":
        return None, parse_block(weights, "block_structure", weights.raw("block_structure"))
    if strategy != "group":
        return None, None
    if size < 1:
        raise weights.error("group_size", size, "must be 1 or more for groups")
    return size, (1, size) if is_float else None
