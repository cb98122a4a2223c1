"""The int8 form of a linear layer's weight, shared by the backends that make and use it."""

from dataclasses import dataclass

import torch

ROTATION = 64  # inputs that the rotation mixes
GROUP = 192  # inputs that share a scale, whole rotations; 64 would cost a tenth of the speed
COLUMNS = 32  # outputs in a block of the packed form


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [num_outputs, num_inputs] rotated by ROTATION inputs, scaled by groups of GROUP, the last of which may
    be shorter, and rounded; outputs and inputs are filled up with zeros to whole blocks and rotations.

    values: int8 [blocks, inputs / 4, COLUMNS, 4], from -127 to 127; scales: float32 [blocks, groups, COLUMNS];
    offsets: int32 [blocks, groups, COLUMNS], -128 times the sum of a group's values, which takes back what bytes gain
    by being unsigned.
    """

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    num_outputs: int
    num_inputs: int

    @classmethod
    def empty(cls, num_outputs: int, num_inputs: int, device: torch.device) -> "QuantizedWeight":
        blocks, rotations, groups = -(-num_outputs // COLUMNS), -(-num_inputs // ROTATION), -(-num_inputs // GROUP)
        return cls(
            torch.empty(blocks, rotations * ROTATION // 4, COLUMNS, 4, dtype=torch.int8, device=device),
            torch.empty(blocks, groups, COLUMNS, device=device),
            torch.empty(blocks, groups, COLUMNS, dtype=torch.int32, device=device),
            num_outputs,
            num_inputs,
        )

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + self.offsets.nbytes

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values int8 [num_outputs, inputs] and scales float32 [num_outputs, groups], unpacked; inputs are filled up to
        whole rotations."""
        values = self.values.transpose(1, 2).flatten(2).flatten(0, 1)
        scales = self.scales.transpose(1, 2).flatten(0, 1)
        return values[: self.num_outputs], scales[: self.num_outputs]
