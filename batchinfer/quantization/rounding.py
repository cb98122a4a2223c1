"""The grid of integers that weights are rounded to, and rounding to nearest on it: how every method that makes a
quantised weight ends. Called by awq_search, gptq_solve and conversion/."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchinfer.kernels.common.fp8 import STORAGE_MAX, encode
from batchinfer.kernels.quantized_linear.stored import Fp8Weight, IntegerWeight

_SMALLEST_SCALE = 2.0**-24  # of float16, so that no group's scale is 0


@dataclass(frozen=True, slots=True)
class Grid:
    """What a format can store for a weight. group_size: inputs that share a scale and a zero point; -1: all of a row.
    lowest_zero: the least zero point that an asymmetric format can write. Functions but `of` take resolved grids."""

    bits: int
    group_size: int
    symmetric: bool
    lowest_zero: int = 0

    def of(self, num_inputs: int) -> "Grid":
        """The grid of a weight with that many inputs: group_size -1 resolved."""
        return replace(self, group_size=num_inputs) if self.group_size == -1 else self

    @property
    def highest(self) -> int:
        """The largest stored integer; the smallest is 0."""
        return 2**self.bits - 1

    @property
    def middle(self) -> int:
        """The zero point of symmetric weights."""
        return 2 ** (self.bits - 1)


def in_groups(weight: Tensor, grid: Grid) -> Tensor:
    """[N, K] seen as [N, K / group_size, group_size]."""
    return weight.unflatten(-1, (-1, grid.group_size))


def group_range(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest and highest value of each group and 0, [..., 1]."""
    return groups.amin(-1, keepdim=True).clamp_max(0.0), groups.amax(-1, keepdim=True).clamp_min(0.0)


def fit(low: Tensor, high: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Scales and zero points, both float32 and of low's shape, with which the grid spans from `low` to `high`.

    Symmetric grids span both ways as far as the farther of the two. Scales are numbers that float16 and bfloat16 both
    hold, so that readers that compute in either find the same weight.
    """
    if grid.symmetric:
        scales = storable(2.0 * torch.maximum(-low, high) / grid.highest)
        return scales, torch.full_like(scales, float(grid.middle))
    span = high - low
    if grid.lowest_zero:  # a step below 0 must exist
        span = torch.maximum(span, high * (grid.highest / (grid.highest - grid.lowest_zero)))
    scales = storable(span / grid.highest)
    return scales, (-low / scales).round_().clamp_(grid.lowest_zero, grid.highest)


def storable(scales: Tensor) -> Tensor:
    """The nearest numbers, float32, that bfloat16 and float16 both hold, never 0."""
    return scales.to(torch.bfloat16).to(torch.float16).to(torch.float32).clamp_min_(_SMALLEST_SCALE)


def to_integers(groups: Tensor, scales: Tensor, zeros: Tensor, grid: Grid) -> Tensor:
    """The nearest points of the grid, integers in float32."""
    return torch.div(groups, scales).round_().add_(zeros).clamp_(0, grid.highest)


def rounded(groups: Tensor, scales: Tensor, zeros: Tensor, grid: Grid) -> Tensor:
    """The weights that those integers mean."""
    return to_integers(groups, scales, zeros, grid).sub_(zeros).mul_(scales)


def nearest(weight: Tensor, grid: Grid) -> Tensor:
    """weight: float32 [N, K]. The same with each group rounded over its whole range."""
    groups = in_groups(weight, grid)
    return rounded(groups, *fit(*group_range(groups), grid), grid).flatten(1)


def round_to_nearest(weight: Tensor, grid: Grid, limits: tuple[Tensor, Tensor] | None = None) -> IntegerWeight:
    """weight: float32 [N, K]. limits: lowest and highest value that each group shall span, [N, K / group_size, 1];
    None: its whole range."""
    groups = in_groups(weight, grid)
    scales, zeros = fit(*(limits or group_range(groups)), grid)
    return stored_weight(to_integers(groups, scales, zeros, grid).flatten(1), scales[..., 0], zeros[..., 0], grid)


def stored_weight(
    integers: Tensor, scales: Tensor, zeros: Tensor, grid: Grid, permutation: Tensor | None = None
) -> IntegerWeight:
    """integers: float32 [N, K]; scales, zeros: float32 [N, K / group_size]."""
    return IntegerWeight(
        bits=grid.bits,
        group_size=grid.group_size,
        values=integers.to(torch.uint8),
        scales=scales.to(torch.float16),
        zeros=zeros.contiguous(),
        offsets=None,
        permutation=permutation,
    )


def round_to_fp8(weight: Tensor) -> Fp8Weight:
    """weight: float32 [N, K]. Each row scaled so that its largest weight is e4m3's largest number."""
    limit = STORAGE_MAX[torch.float8_e4m3fn]
    scales = storable(weight.abs().amax(1, keepdim=True) / limit)
    return Fp8Weight(encode(weight / scales, torch.float8_e4m3fn), scales, (1, weight.shape[1]))
