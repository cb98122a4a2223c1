"""GGUF's quantised blocks, in a model directory that models/gguf_conversion made with its blocks kept as they are.
Chosen by config.parse.

Blocks: ggml's Q4_0, Q4_1, Q8_0, Q4_K and Q6_K; each becomes integers with a scale, and an offset or zero, a group, and
dequantises to the numbers of ggml's own formulas.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.kernels.quantized_linear.stored import IntegerWeight
from batchinfer.quantization.fields import QuantizationFields
from batchinfer.quantization.scheme import checked
from batchinfer.quantization.tensors import ModuleTensors

BLOCKS = "weight_blocks"  # the tensor's suffix: uint8 [outputs, bytes of a row]
_Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # values, scales, zeros, offsets, by row and block


@dataclass(frozen=True, slots=True)
class BlockType:
    """num_bytes that hold num_weights, in groups of group_size. decode: uint8 [rows, blocks, num_bytes] to values
    [rows, blocks, num_weights] and scales, zeros and offsets [rows, blocks, groups of a block]."""

    num_weights: int
    num_bytes: int
    group_size: int
    bits: int
    decode: Callable[[Tensor], _Parts]


@dataclass(frozen=True, slots=True)
class GgufScheme:
    """types: the block type of each quantised layer, the embedding included."""

    types: Mapping[str, str]

    method = "gguf"

    @property
    def description(self) -> str:
        kinds = list(self.types.values())
        return "blocks of " + ", ".join(sorted(set(kinds), key=lambda kind: -kinds.count(kind)))

    def is_quantized(self, tensors: ModuleTensors) -> bool:
        return tensors.has(BLOCKS)

    def read(self, tensors: ModuleTensors, num_outputs: int, num_inputs: int) -> IntegerWeight:
        if tensors.module not in self.types:
            raise tensors.fault(f"quantization_config.types does not name {tensors.module}")
        kind = BLOCK_TYPES[self.types[tensors.module]]
        if num_inputs % kind.num_weights:
            raise tensors.fault(f"{tensors.module}: {num_inputs} inputs do not fill blocks of {kind.num_weights}")
        num_blocks = num_inputs // kind.num_weights
        data = tensors.take(BLOCKS, (torch.uint8,), (num_outputs, num_blocks * kind.num_bytes))
        return checked(tensors, lambda: decode_blocks(data, kind))


def decode_blocks(data: Tensor, kind: BlockType) -> IntegerWeight:
    """data: uint8 [N, bytes of a row]."""
    values, *of_groups = kind.decode(data.unflatten(-1, (-1, kind.num_bytes)))
    scales, zeros, offsets = (part if part is None else part.flatten(1).contiguous() for part in of_groups)
    assert scales is not None
    return IntegerWeight(kind.bits, kind.group_size, values.flatten(1).contiguous(), scales, zeros, offsets)


def parse_gguf(fields: QuantizationFields) -> GgufScheme:
    """fields: of the quantization_config that models/gguf_conversion writes."""
    types = dict(fields.mapping("types").items())
    for module, kind in types.items():
        fields.choice(kind, f"types.{module}", tuple(BLOCK_TYPES))
    return GgufScheme(types)


def _nibbles(octets: Tensor) -> Tensor:
    """The low halves of all octets, then the high ones: uint8 [..., 2 n]."""
    return torch.cat([octets & 15, octets >> 4], dim=-1)


def _half(octets: Tensor) -> Tensor:
    """fp16 [..., n] of octets [..., 2 n]."""
    return octets.contiguous().view(torch.float16)


def _q4_0(blocks: Tensor) -> _Parts:
    scales = _half(blocks[..., :2])
    return _nibbles(blocks[..., 2:]), scales, torch.full_like(scales, 8, dtype=torch.float32), None


def _q4_1(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[..., 4:]), _half(blocks[..., :2]), None, _half(blocks[..., 2:4])


def _q8_0(blocks: Tensor) -> _Parts:
    scales = _half(blocks[..., :2])  # bytes of two's complement, which 128 makes unsigned
    return blocks[..., 2:] ^ 128, scales, torch.full_like(scales, 128, dtype=torch.float32), None


def _q4_k(blocks: Tensor) -> _Parts:
    """Eight groups of 32 whose scales and minima are of 6 bits, times an fp16 each."""
    scale, least = (_half(blocks[..., start : start + 2]).to(torch.float32) for start in (0, 2))
    first, second, third = (blocks[..., start : start + 4] for start in (4, 8, 12))
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=-1)
    minima = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=-1)
    values = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2)
    return values, scale * scales, None, -(least * minima)


def _q6_k(blocks: Tensor) -> _Parts:
    """Sixteen groups of 16 with int8 scales, times an fp16. The low 4 bits of a half lie apart from its high 2."""
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts[:, None]) & 3
    values = (low | (high.flatten(-2) << 4)).flatten(-2)
    scales = _half(blocks[..., 208:]).to(torch.float32) * blocks[..., 192:208].contiguous().view(torch.int8)
    return values, scales, torch.full_like(scales, 32), None


BLOCK_TYPES = {
    "Q4_0": BlockType(32, 18, 32, 4, _q4_0),
    "Q4_1": BlockType(32, 20, 32, 4, _q4_1),
    "Q8_0": BlockType(32, 34, 32, 8, _q8_0),
    "Q4_K": BlockType(256, 144, 32, 4, _q4_k),
    "Q6_K": BlockType(256, 210, 16, 8, _q6_k),
}
