"""AWQ checkpoints in the layouts of AutoAWQ (gemm, gemv, gemv_fast) and llm-awq. Chosen by config.parse.

Layouts: AutoAWQ, awq/modules/linear/{gemm,gemv,gemv_fast}.py; llm-awq, awq/quantize/qmodule.py. llm-awq writes
gemv_fast with another name for the zeros, and wrote gemv before.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.kernels.quantized_linear.stored import SCALE_DTYPES, IntegerWeight
from batchinfer.quantization.fields import QuantizationFields
from batchinfer.quantization.scheme import checked
from batchinfer.quantization.tensors import ModuleTensors
from batchinfer.quantization.unpacking import unpack

_BITS = 4
_LAYOUTS = ("gemm", "gemv", "gemv_fast")
_NIBBLE_OF_COLUMN = [0, 4, 1, 5, 2, 6, 3, 7]  # gemm: where in a word each of its 8 outputs lies
_STRIDE = 64  # gemv_fast: inputs of 4 rows that are interleaved


@dataclass(frozen=True, slots=True)
class AwqScheme:
    """group_size: -1 is one group. unquantized: parts of names of layers that the config lists as 16-bit."""

    layout: str
    group_size: int
    unquantized: tuple[str, ...]

    method = "awq"

    @property
    def description(self) -> str:
        return f"{_BITS} bits in groups of {'all' if self.group_size == -1 else self.group_size} inputs ({self.layout})"

    def is_quantized(self, tensors: ModuleTensors) -> bool:
        if tensors.has("weight") and any(part in tensors.module for part in self.unquantized):
            return False
        return tensors.has("qweight") or tensors.has("qzeros") or tensors.has("scaled_zeros")

    def read(self, tensors: ModuleTensors, num_outputs: int, num_inputs: int) -> IntegerWeight:
        group_size = num_inputs if self.group_size == -1 else self.group_size
        if num_inputs % group_size:
            raise tensors.fault(f"{tensors.module}: groups of {group_size} do not divide its {num_inputs} inputs")
        layout = "gemv_fast" if tensors.dtype("qweight") == torch.int16 else self.layout
        read = {"gemm": _read_gemm, "gemv": _read_gemv, "gemv_fast": _read_gemv_fast}[layout]
        values, scales, zeros, offsets = read(tensors, num_outputs, num_inputs, num_inputs // group_size)
        return checked(tensors, lambda: IntegerWeight(_BITS, group_size, values, scales, zeros, offsets))


def parse_awq(fields: QuantizationFields) -> AwqScheme:
    """fields: of quantization_config, or of the quant_config.json of older checkpoints."""
    fields.choice(fields.integer("bits", "w_bit", default=_BITS), "bits", (_BITS,))
    group_size = fields.integer("group_size", "q_group_size", default=128)
    if group_size != -1 and group_size < 1:
        raise fields.error("group_size", group_size, "must be -1 or 1 or more")
    is_llm_awq = fields.text("backend").lower() == "llm-awq"
    layout = fields.text("version", "format", "checkpoint_format", default="gemv" if is_llm_awq else "gemm").lower()
    layout = {"gemv-fast": "gemv_fast", "llm-awq": "gemv"}.get(layout, layout)
    fields.choice(layout, "version", _LAYOUTS)
    return AwqScheme(layout, group_size, fields.texts("modules_to_not_convert"))


_Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def _read_gemm(tensors: ModuleTensors, num_outputs: int, num_inputs: int, num_groups: int) -> _Parts:
    words = num_outputs // 8
    if num_outputs % 8:
        raise tensors.fault(f"{tensors.module}: {num_outputs} outputs do not fill words of 8")
    qweight = tensors.take("qweight", (torch.int32,), (num_inputs, words))
    qzeros = tensors.take("qzeros", (torch.int32,), (num_groups, words))
    scales = tensors.take("scales", SCALE_DTYPES, (num_groups, num_outputs))
    return _columns(qweight), scales.T.contiguous(), _columns(qzeros).to(torch.float32), None


def _columns(words: Tensor) -> Tensor:
    """uint8 [N, rows] of words [rows, N / 8] in gemm's order."""
    nibbles = unpack(words, _BITS, words.shape[1] * 8).unflatten(-1, (-1, 8))
    return nibbles[..., _NIBBLE_OF_COLUMN].flatten(-2).T.contiguous()


def _read_gemv(tensors: ModuleTensors, num_outputs: int, num_inputs: int, num_groups: int) -> _Parts:
    """Groups are filled up to whole words."""
    if num_inputs % 8:
        raise tensors.fault(f"{tensors.module}: {num_inputs} inputs do not fill words of 8")
    qweight = tensors.take("qweight", (torch.int32,), (num_outputs, num_inputs // 8))
    qzeros = tensors.take("qzeros", (torch.int32,), (num_outputs, None))
    scales = tensors.take("scales", SCALE_DTYPES, (num_outputs, 8 * qzeros.shape[1]))
    _check_groups(tensors, scales.shape[1], num_groups)
    zeros = unpack(qzeros, _BITS, num_groups).to(torch.float32)
    return unpack(qweight, _BITS, num_inputs), scales[:, :num_groups].contiguous(), zeros, None


def _read_gemv_fast(tensors: ModuleTensors, num_outputs: int, num_inputs: int, num_groups: int) -> _Parts:
    """The zeros are floats, the negative products of scale and zero point."""
    if num_outputs % 4 or num_inputs % _STRIDE:
        raise tensors.fault(f"{tensors.module}: {num_outputs} x {num_inputs} does not fill tiles of 4 x {_STRIDE}")
    qweight = tensors.take("qweight", (torch.int16,), (num_outputs // 4, num_inputs))
    scales = tensors.take("scales", SCALE_DTYPES, (None, num_outputs))
    name = "scaled_zeros" if tensors.has("scaled_zeros") else "qzeros"
    offsets = tensors.take(name, SCALE_DTYPES, tuple(scales.shape))
    _check_groups(tensors, scales.shape[0], num_groups)
    tiles = unpack(qweight, _BITS, 4 * num_inputs).view(num_outputs // 4, num_inputs // _STRIDE, 4, _STRIDE)
    rows = tiles.transpose(1, 2).reshape(num_outputs, num_inputs // 32, 4, 2, 4)
    values = rows.transpose(3, 4).transpose(2, 3).reshape(num_outputs, num_inputs)
    return values, scales[:num_groups].T.contiguous(), None, offsets[:num_groups].T.contiguous()


def _check_groups(tensors: ModuleTensors, stored: int, num_groups: int) -> None:
    if stored < num_groups:
        raise tensors.fault(f"tensor {tensors.module}.scales has {stored} groups, not the {num_groups} of its inputs")
