"""The int8 form of a linear layer's weight, made from a float one when a model is loaded; shared by the backends."""

from dataclasses import dataclass

import torch

GROUP = 64  # inputs that share a scale and are mixed by the rotation
COLUMNS = 32  # outputs in a block of the packed form
ROWS_AT_ONCE = 2048  # bounds the float32 copies while packing; a multiple of COLUMNS
ZERO = 128  # as in cpu.cpp


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

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + self.offsets.nbytes

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values int8 [num_outputs, groups, GROUP] and scales float32 [num_outputs, groups], unpacked."""
        blocks, groups = self.scales.shape[:2]
        values = self.values.permute(0, 3, 1, 2, 4).reshape(blocks * COLUMNS, groups, GROUP)
        scales = self.scales.permute(0, 2, 1).reshape(blocks * COLUMNS, groups)
        return values[: self.num_outputs], scales[: self.num_outputs]


def quantize_weight(weight: torch.Tensor) -> QuantizedWeight:
    """weight: float [num_outputs, num_inputs]; symmetric, the largest value of each output's group becoming 127.

    The rotation is an orthogonal Walsh-Hadamard transform of each group, applied to weight and activations alike: it
    leaves products as they are and spreads outliers over their group (QuaRot, arXiv 2404.00456).
    """
    num_outputs, num_inputs = weight.shape
    blocks, groups = -(-num_outputs // COLUMNS), -(-num_inputs // GROUP)
    packed = QuantizedWeight(
        torch.empty(blocks, groups, GROUP // 4, COLUMNS, 4, dtype=torch.int8, device=weight.device),
        torch.empty(blocks, groups, COLUMNS, device=weight.device),
        torch.empty(blocks, groups, COLUMNS, dtype=torch.int32, device=weight.device),
        num_outputs,
        num_inputs,
    )
    for first in range(0, num_outputs, ROWS_AT_ONCE):
        _pack(weight[first : first + ROWS_AT_ONCE], packed, first // COLUMNS)
    return packed


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x: float32 [..., GROUP], times 1/8 of the Hadamard matrix; sums go pair by pair, as in cpu.cpp."""
    shape, distance = x.shape, 1
    while distance < GROUP:
        a, b = x.reshape(-1, GROUP // (2 * distance), 2, distance).unbind(2)
        x = torch.stack((a + b, a - b), dim=2)
        distance *= 2
    return x.reshape(shape) * 0.125


def split_groups(x: torch.Tensor) -> torch.Tensor:
    """[n, num_inputs] to float32 [n, groups, GROUP], filled up with zeros."""
    missing = -x.shape[-1] % GROUP
    return torch.nn.functional.pad(x.to(torch.float32), (0, missing)).unflatten(-1, (-1, GROUP))


def _pack(rows: torch.Tensor, packed: QuantizedWeight, first: int) -> None:
    rotated = rotate(split_groups(rows))
    rotated = torch.nn.functional.pad(rotated, (0, 0, 0, 0, 0, -len(rows) % COLUMNS))
    scales = rotated.abs().amax(-1) / 127
    values = (rotated / scales.clamp(min=1e-30).unsqueeze(-1)).round()
    groups = rotated.shape[1]
    blocks = slice(first, first + len(rotated) // COLUMNS)
    by_block = values.view(-1, COLUMNS, groups, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    packed.values[blocks] = by_block.to(torch.int8)
    packed.scales[blocks] = scales.view(-1, COLUMNS, groups).transpose(1, 2)
    packed.offsets[blocks] = values.sum(-1).view(-1, COLUMNS, groups).transpose(1, 2).to(torch.int32) * -ZERO
