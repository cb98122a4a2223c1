"""GPTQ checkpoints, v1 and v2, in 2, 3, 4 and 8 bits, as GPTQModel, AutoGPTQ and AutoRound write them. Chosen by
config.parse.

Layout: GPTQModel, gptqmodel/nn_modules/qlinear/__init__.py and utils/model.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchinfer.kernels.quantized_linear.stored import BITS, SCALE_DTYPES, IntegerWeight
from batchinfer.quantization.fields import QuantizationFields
from batchinfer.quantization.scheme import checked
from batchinfer.quantization.tensors import ModuleTensors
from batchinfer.quantization.unpacking import group_order, unpack

_FORMATS = ("gptq", "gptq_v2")
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # a 1 in each field of a word


@dataclass(frozen=True, slots=True)
class _Rule:
    """An entry of `dynamic`: what layers whose names begin with a match of the pattern have. bits None: no integers."""

    pattern: re.Pattern[str]
    bits: int | None
    group_size: int


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """group_size: -1 is one group. is_v1: zero points are stored less 1. borrows: by subtraction from whole words, so
    that a zero point of 0 borrows from its neighbour."""

    bits: int
    group_size: int
    is_v1: bool
    borrows: bool
    is_ordered: bool
    rules: tuple[_Rule, ...]

    method = "gptq"

    @property
    def description(self) -> str:
        groups = "all" if self.group_size == -1 else self.group_size
        rules = f", {len(self.rules)} rules for other layers" if self.rules else ""
        return f"{self.bits} bits in groups of {groups} inputs ({'v1' if self.is_v1 else 'v2'}{rules})"

    def is_quantized(self, tensors: ModuleTensors) -> bool:
        if tensors.has("weight") and self._settings(tensors.module)[0] is None:
            return False
        return tensors.has("qweight") or tensors.has("qzeros")

    def read(self, tensors: ModuleTensors, num_outputs: int, num_inputs: int) -> IntegerWeight:
        bits, group_size = self._settings(tensors.module)
        bits = bits or self.bits
        group_size = min(group_size, num_inputs) if group_size != -1 else num_inputs
        num_groups = -(-num_inputs // group_size)
        for name, size in (("inputs", num_inputs), ("outputs", num_outputs)):
            if size * bits % 32:
                raise tensors.fault(f"{tensors.module}: {size} {name} of {bits} bits do not fill words of 32")
        qweight = tensors.take("qweight", (torch.int32,), (num_inputs * bits // 32, num_outputs))
        qzeros = tensors.take("qzeros", (torch.int32,), (num_groups, num_outputs * bits // 32))
        scales = tensors.take("scales", SCALE_DTYPES, (num_groups, num_outputs)).T.contiguous()
        zeros = self._zeros(qzeros, bits, num_outputs).T.to(torch.float32).contiguous()
        order = self._order(tensors, num_inputs, group_size)
        values = unpack(qweight.T, bits, num_inputs)
        values = values if order is None else values[:, order]
        return checked(tensors, lambda: IntegerWeight(bits, group_size, values, scales, zeros, None, order))

    def _settings(self, module: str) -> tuple[int | None, int]:
        """Bits and group size of a layer; the first rule that fits wins."""
        rule = next((rule for rule in self.rules if rule.pattern.match(module)), None)
        return (self.bits, self.group_size) if rule is None else (rule.bits, rule.group_size)

    def _zeros(self, qzeros: Tensor, bits: int, num_outputs: int) -> Tensor:
        """uint8 [G, N]. A v1 file has z - 1, in which -1 is all ones: no zero point is above 2^bits - 1."""
        if not self.is_v1:
            return unpack(qzeros, bits, num_outputs)
        if self.borrows and bits in _ONES:
            return unpack(qzeros + _ONES[bits], bits, num_outputs)
        return (unpack(qzeros, bits, num_outputs) + 1) & (2**bits - 1)

    def _order(self, tensors: ModuleTensors, num_inputs: int, group_size: int) -> Tensor | None:
        if not tensors.has("g_idx"):
            if self.is_ordered and group_size < num_inputs:
                raise tensors.fault(f"there is no tensor {tensors.module}.g_idx, which desc_act needs")
            return None
        g_idx = tensors.take("g_idx", (torch.int32, torch.int64), (num_inputs,))
        if not self.is_ordered and not bool(g_idx.any()):
            return None  # never filled in; without desc_act it says nothing
        try:
            return group_order(g_idx, group_size)
        except ValueError as error:
            raise tensors.fault(f"tensor {tensors.module}.g_idx {error}") from error


def parse_gptq(fields: QuantizationFields) -> GptqScheme:
    """fields: of quantization_config, or of the quantize_config.json of older checkpoints."""
    form = fields.choice(fields.text("checkpoint_format", "format", default="gptq").lower(), "format", _FORMATS)
    fields.choice(fields.text("pack_dtype", default="int32"), "pack_dtype", ("int32",))
    for name in ("rotation", "adapter", "is_marlin_format"):
        fields.refuse(name)
    bits, group_size = _bits(fields, None), _group_size(fields, None)
    quantizer = fields.mapping("meta").raw("quantizer", default="")
    return GptqScheme(
        bits=bits,
        group_size=group_size,
        is_v1=form == "gptq",
        borrows="gptqmodel" in str(quantizer),  # its exporter takes 1 from each field by one subtraction a word
        is_ordered=fields.boolean("desc_act", False),
        rules=tuple(_rule(fields, *entry) for entry in fields.mapping("dynamic").items()),
    )


def _rule(fields: QuantizationFields, text: str, value: Any) -> _Rule:
    pattern = fields.pattern(text.removeprefix("-:").removeprefix("+:"))
    if text.startswith("-:"):
        return _Rule(pattern, None, -1)
    if not isinstance(value, Mapping):
        raise fields.error(f"dynamic[{text!r}]", value, "must be an object")
    own = QuantizationFields(value, f"{fields.where}.dynamic[{text!r}]")
    return _Rule(pattern, _bits(own, _bits(fields, None)), _group_size(own, _group_size(fields, None)))


def _bits(fields: QuantizationFields, default: int | None) -> int:
    bits = fields.integer("bits", "w_bit", "wbits", default=default)
    fields.choice(bits, "bits", BITS)
    return bits


def _group_size(fields: QuantizationFields, default: int | None) -> int:
    group_size = fields.integer("group_size", "groupsize", default=-1 if default is None else default)
    if group_size != -1 and group_size < 1:
        raise fields.error("group_size", group_size, "must be -1 or 1 or more")
    return group_size
