"""The int8 form of a linear layer's weight, and the order of the outputs of gated layers. Shared by the backends that
make and use such weights."""

from dataclasses import dataclass, field
from typing import Any

import torch

ROTATION = 64  # inputs that the rotation mixes
GROUP = 192  # inputs that share a scale, whole rotations; 64 would cost a tenth of the speed
COLUMNS = 32  # outputs in a block of the packed form


def can_pair(num_outputs: int) -> bool:
    """Whether the halves of a weight's outputs fill blocks together."""
    return num_outputs % COLUMNS == 0


def pair_halves(rows: torch.Tensor) -> torch.Tensor:
    """rows: [N, ...], a gate's over those that it multiplies. In the result each COLUMNS rows are 16 of the gate and
    the 16 that belong to them, so that a product has both in one block."""
    return rows.unflatten(0, (2, -1, COLUMNS // 2)).transpose(0, 1).flatten(0, 2)


def part_halves(rows: torch.Tensor) -> torch.Tensor:
    """What pair_halves had."""
    return rows.unflatten(0, (-1, 2, COLUMNS // 2)).transpose(0, 1).flatten(0, 2)


class NativeForm(list[Any]):
    """What a backend made of a weight for its calls, with the bias that goes with it: pointers, so that a deep copy and
    what is sent to another process begin without. Empty before the first call."""

    def __reduce__(self) -> tuple[type["NativeForm"], tuple[()]]:
        return NativeForm, ()


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [num_outputs, num_inputs] rotated by ROTATION inputs, scaled by groups of GROUP, the last of which may
    be shorter, and rounded; outputs and inputs are filled up with zeros to whole blocks and rotations.

    values: int8 [blocks, inputs / 4, COLUMNS, 4], from -127 to 127; scales: float32 [blocks, groups, COLUMNS];
    offsets: int32 [blocks, groups, COLUMNS], -128 times the sum of a group's values, which takes back what bytes gain
    by being unsigned. is_paired: the outputs are in the order of pair_halves.
    """

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    num_outputs: int
    num_inputs: int
    is_paired: bool
    native: NativeForm = field(default_factory=NativeForm, init=False, repr=False, compare=False)

    @classmethod
    def empty(
        cls, num_outputs: int, num_inputs: int, device: torch.device, is_paired: bool = False
    ) -> "QuantizedWeight":
        blocks, rotations, groups = -(-num_outputs // COLUMNS), -(-num_inputs // ROTATION), -(-num_inputs // GROUP)
        return cls(
            torch.empty(blocks, rotations * ROTATION // 4, COLUMNS, 4, dtype=torch.int8, device=device),
            torch.empty(blocks, groups, COLUMNS, device=device),
            torch.empty(blocks, groups, COLUMNS, dtype=torch.int32, device=device),
            num_outputs,
            num_inputs,
            is_paired,
        )

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + self.offsets.nbytes

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values int8 [num_outputs, inputs] and scales float32 [num_outputs, groups], unpacked and in the order of the
        outputs; inputs are filled up to whole rotations."""
        values = self.values.transpose(1, 2).flatten(2).flatten(0, 1)
        scales = self.scales.transpose(1, 2).flatten(0, 1)
        if self.is_paired:
            return part_halves(values), part_halves(scales)
        return values[: self.num_outputs], scales[: self.num_outputs]
