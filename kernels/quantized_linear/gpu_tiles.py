"""Sizes of tiles, and how the inputs are cut where few rows would leave a device idle. Shared by the Triton backends of
the linear layers' products."""

import torch
import triton
from batchinfer.kernels.common import triton_targets

SPLIT_ROWS = 64  # up to here the device is filled by cutting the inputs
BLOCK_N = 128  # outputs of a tile
MOST_ROWS = 128  # of a tile; what kernels read without a mask is filled up to whole ones
_PROGRAMS = 256  # that fill a device
_MOST_SPLITS = 8


def splits(num_outputs: int, num_rows: int, steps: int) -> int:
    """Parts that the inputs are cut into, which are steps of a kernel's loop. It depends on the weight, and on whether
    there are more than SPLIT_ROWS rows."""
    if num_rows > SPLIT_ROWS:
        return 1
    tiles = triton.cdiv(num_outputs, BLOCK_N)
    split = 1
    while split < _MOST_SPLITS and tiles * split < _PROGRAMS // 2 and steps >= 8 * split:
        split *= 2
    return split


Tiles = dict[int, tuple[int, int]]  # rows of a tile: warps, and stages of the pipeline


def tiles(most: int, few_warps: int, warps: int, stages: int) -> Tiles:
    """Of up to `most` rows, those with fewer by few_warps."""
    return {rows: (warps if rows == most else few_warps, stages) for rows in (16, 32, 64, 128) if rows <= most}


def tile(num_rows: int, of_generations: dict[str, Tiles]) -> tuple[int, dict[str, int]]:
    """Rows of a tile for so many, and options of the launch."""
    known = of_generations[triton_targets.current().generation]
    rows = min(max(known), max(min(known), triton.next_power_of_2(num_rows)))
    warps, stages = known[rows]
    return rows, {"num_warps": warps, "num_stages": stages}


def parts_of(split: int, out: torch.Tensor) -> torch.Tensor:
    """What a kernel writes: `out`, or float32 [split, ...] for join."""
    return out if split == 1 else torch.empty((split, *out.shape), device=out.device)


def join(parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Adds up what parts_of gave, and the bias, where that is not `out` itself."""
    if parts is not out:
        total = parts.sum(0)
        out.copy_(total if bias is None else total + bias)


def dense_rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x with rows that lie as kernels read them, and what their distance is a known multiple of."""
    x = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 else x.contiguous()
    return x, 8 if x.stride(0) % 8 == 0 else 1
