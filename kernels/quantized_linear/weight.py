"""The int8 form of a linear layer's weight, shared by the backends that make and use it."""

from dataclasses import dataclass

import torch

GROUP = 64  # inputs that share a scale and are mixed by the rotation
COLUMNS = 32  # outputs in a block of the packed form


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [num_outputs, num_inputs] whose groups of GROUP inputs are rotated, scaled and rounded; outputs and
    inputs are filled up with zeros to whole blocks and groups.

    values: int8 [blocks, groups, GROUP / 4, COLUMNS, 4], from -127 to 127; scales: float32 [blocks, groups, COLUMNS];
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
        blocks, groups = -(-num_outputs // COLUMNS), -(-num_inputs // GROUP)
        return cls(
            torch.empty(blocks, groups, GROUP // 4, COLUMNS, 4, dtype=torch.int8, device=device),
            torch.empty(blocks, groups, COLUMNS, device=device),
            torch.empty(blocks, groups, COLUMNS, dtype=torch.int32, device=device),
            num_outputs,
            num_inputs,
        )

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + self.offsets.nbytes

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values int8 [num_outputs, groups, GROUP] and scales float32 [num_outputs, groups], unpacked."""
        blocks, groups = self.scales.shape[:2]
        values = self.values.permute(0, 3, 1, 2, 4).reshape(blocks * COLUMNS, groups, GROUP)
        scales = self.scales.permute(0, 2, 1).reshape(blocks * COLUMNS, groups)
        return values[: self.num_outputs], scales[: self.num_outputs]
