"""The form in which a linear layer's weight stays in memory and its products read it: 4 or 8 bits, or bf16, a number,
in blocks of outputs. Shared by the backends of packed_linear."""

import enum
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from batchinfer.kernels.quantized_linear.stored import Fp8Weight, IntegerWeight
from batchinfer.kernels.quantized_linear.weight import COLUMNS, NativeForm, can_pair, pair_halves, part_halves
from torch import Tensor

STEP = 4  # inputs that are unpacked at once; groups are filled up to whole steps


class Kind(enum.IntEnum):
    """What a weight's values are; as in unpack.h."""

    INT4 = 0
    UINT8 = 1
    E4M3 = 2
    BF16 = 3


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [num_outputs, num_inputs] in blocks of COLUMNS outputs by steps of STEP inputs, filled up with zeros.

    values: [blocks, steps, bytes of a step], uint8, or bf16 [blocks, steps, 2, COLUMNS, 2] where the weight is not
    quantised. A step of bytes is [2, COLUMNS, 2]: pairs of inputs side by side. A step of 4-bit numbers is
    [8, 2, 2, 2]: outputs o, inputs p, input pairs q and halves h of the block; of a byte, the low 4 bits are output
    16 h + o and the high ones output 16 h + 8 + o, both of input 2 q + p.

    parameters: fp16, or float32 where that would lose something, [blocks, groups, 2, COLUMNS]: scales, and zeros or
    offsets, of each group of `group_steps` steps; None where the weight is not quantised. The numbers stand for
    (value - zero) * scale, or value * scale + offset with `has_offsets`.

    inputs: int32 [STEP * steps], which input a column meets and -1 where it is filling; None where they follow each
    other and none is filled up.

    is_paired: the blocks hold the outputs in the order of pair_halves.
    """

    kind: Kind
    values: Tensor
    parameters: Tensor | None
    has_offsets: bool
    group_steps: int
    inputs: Tensor | None
    num_outputs: int
    num_inputs: int
    is_paired: bool
    native: NativeForm = field(default_factory=NativeForm, init=False, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.values, self.parameters, self.inputs) if t is not None)

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """What a product with many rows of `dtype` takes beside its operands: products unpack blocks as they go."""
        return 0

    @property
    def gives_rows(self) -> bool:
        """Whether `rows` can be called: for a weight that is neither quantised nor paired nor filled up."""
        return self.kind == Kind.BF16 and self.inputs is None and not self.is_paired

    def rows(self, outputs: Tensor) -> Tensor:
        """bf16 [n, num_inputs], the weights of outputs, int64 [n]."""
        pairs = self.values.flatten(1, 2).view(torch.int32).squeeze(-1)  # [blocks, pairs of inputs, COLUMNS]
        return pairs[outputs // COLUMNS, :, outputs % COLUMNS].view(torch.bfloat16)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[num_outputs, num_inputs] in the order of both, computed in float32 and rounded once."""
        columns = self._numbers()
        if self.parameters is not None:
            scales, shifts = (self._by_column(i, columns.shape[1]) for i in range(2))
            columns = columns * scales + shifts if self.has_offsets else (columns - shifts) * scales
        columns = columns[: self.num_outputs].to(dtype)
        columns = part_halves(columns) if self.is_paired else columns
        if self.inputs is None:
            return columns
        out = torch.empty(self.num_outputs, self.num_inputs, dtype=dtype, device=columns.device)
        is_input = self.inputs >= 0
        out[:, self.inputs[is_input].to(torch.int64)] = columns[:, is_input]
        return out

    def _numbers(self) -> Tensor:
        """float32 [COLUMNS * blocks, STEP * steps]"""
        blocks, steps = self.values.shape[:2]
        if self.kind == Kind.INT4:
            octets = torch.stack((self.values & 15, self.values >> 4), dim=-1).view(blocks, steps, 8, 2, 2, 2, 2)
            ordered = octets.permute(0, 5, 6, 2, 1, 4, 3)  # block, h, octet, o, step, q, p
        else:
            values = self.values.view(torch.float8_e4m3fn) if self.kind == Kind.E4M3 else self.values
            ordered = values.view(blocks, steps, 2, COLUMNS, 2).permute(0, 3, 1, 2, 4)
        return ordered.to(torch.float32).reshape(blocks * COLUMNS, steps * STEP)

    def _by_column(self, index: int, num_columns: int) -> Tensor:
        assert self.parameters is not None
        groups = self.parameters[:, :, index].to(torch.float32).transpose(1, 2).flatten(0, 1)
        return groups.repeat_interleave(STEP * self.group_steps, dim=1)[:, :num_columns]


def pack_weight(weight: IntegerWeight | Fp8Weight | Tensor, is_gated: bool = False) -> PackedWeight:
    """See the package's `pack_weight`."""
    is_paired = is_gated and can_pair(weight.shape[0])
    if isinstance(weight, Tensor):
        return _pack_bf16(weight, is_paired)
    if isinstance(weight, IntegerWeight):
        values, group_size, permutation = weight.values, weight.group_size, weight.permutation
        kind = Kind.INT4 if weight.bits <= 4 else Kind.UINT8
        scales, shifts = weight.scales, weight.offsets if weight.zeros is None else weight.zeros
    else:
        values, group_size, permutation = weight.values.view(torch.uint8), weight.block[1], None
        kind, scales, shifts = Kind.E4M3, weight.row_scales(), None
    shifts = torch.zeros_like(scales) if shifts is None else shifts
    if is_paired:
        values, scales, shifts = pair_halves(values), pair_halves(scales), pair_halves(shifts)
    num_outputs, num_inputs = values.shape
    columns = _columns(num_inputs, group_size, values.device)
    filled = _fill(values, columns)
    return PackedWeight(
        kind,
        _pack_nibbles(filled) if kind == Kind.INT4 else _pair_inputs(filled).flatten(2),
        _pack_parameters(scales, shifts),
        isinstance(weight, IntegerWeight) and weight.offsets is not None,
        -(-group_size // STEP),
        _input_of_column(columns, num_inputs, permutation),
        num_outputs,
        num_inputs,
        is_paired,
    )


def _pack_bf16(weight: Tensor, is_paired: bool) -> PackedWeight:
    if weight.dtype != torch.bfloat16 or weight.ndim != 2:
        raise ValueError(f"a weight that is not quantised must be bf16 [N, K], not {weight.dtype} {list(weight.shape)}")
    num_outputs, num_inputs = weight.shape
    columns = _columns(num_inputs, num_inputs, weight.device)
    values = _pair_inputs(_fill(pair_halves(weight) if is_paired else weight, columns))
    inputs = _input_of_column(columns, num_inputs, None)
    return PackedWeight(Kind.BF16, values, None, False, values.shape[1], inputs, num_outputs, num_inputs, is_paired)


def _columns(num_inputs: int, group_size: int, device: torch.device) -> Tensor:
    """int64: the stored column that each packed one holds, -1 for filling. Groups start at whole steps."""
    groups = torch.arange(num_inputs, device=device).split(group_size)
    return torch.cat([F.pad(group, (0, -len(group) % STEP), value=-1) for group in groups])


def _fill(values: Tensor, columns: Tensor) -> Tensor:
    """[N, K] to whole blocks and steps."""
    if len(columns) != values.shape[1]:
        values = torch.where(columns >= 0, values[:, columns.clamp(min=0)], 0).to(values.dtype)
    return F.pad(values, (0, 0, 0, -len(values) % COLUMNS))


def _pair_inputs(values: Tensor) -> Tensor:
    """[32 blocks, 4 steps] to [blocks, steps, 2, COLUMNS, 2]"""
    blocks, steps = values.shape[0] // COLUMNS, values.shape[1] // STEP
    pair = torch.int16 if values.dtype == torch.uint8 else torch.int32  # a copy by whole pairs is several times faster
    pairs = values.contiguous().view(pair).view(blocks, COLUMNS, steps, 2)
    return pairs.permute(0, 2, 3, 1).contiguous().view(values.dtype).view(blocks, steps, 2, COLUMNS, 2)


def _pack_nibbles(values: Tensor) -> Tensor:
    """[32 blocks, 4 steps] to [blocks, steps, 64]"""
    blocks, steps = values.shape[0] // COLUMNS, values.shape[1] // STEP
    halves = values.view(blocks, 2, 2, 8, steps, 2, 2)  # block, h, octet, o, step, q, p
    low, high = halves.unbind(2)
    return (low | (high << 4)).permute(0, 3, 2, 5, 4, 1).reshape(blocks, steps, 64)


def _pack_parameters(scales: Tensor, shifts: Tensor) -> Tensor:
    """[N, groups] each to [blocks, groups, 2, COLUMNS]"""
    both = torch.stack((scales.to(torch.float32), shifts.to(torch.float32)), dim=-1)
    blocks = F.pad(both, (0, 0, 0, 0, 0, -len(both) % COLUMNS)).unflatten(0, (-1, COLUMNS))
    packed = blocks.permute(0, 2, 3, 1).contiguous()
    short = packed.to(torch.float16)
    return short if torch.equal(short.to(torch.float32), packed) else packed


def _input_of_column(columns: Tensor, num_inputs: int, permutation: Tensor | None) -> Tensor | None:
    if permutation is None:
        return None if len(columns) == num_inputs else columns.to(torch.int32)
    return torch.where(columns >= 0, permutation[columns.clamp(min=0)], -1).to(torch.int32)
