"""GPTQ: rounds a weight column by column and lets the columns that follow make up for each one's error. Called by
conversion/. Source: Frantar et al., arXiv 2210.17323."""

from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.errors import BatchInferError
from batchinfer.kernels.quantized_linear.stored import IntegerWeight
from batchinfer.quantization.rounding import Grid, fit, group_range, in_groups, rounded, stored_weight, to_integers

_BLOCK = 128  # columns between which errors are passed on one by one; to later ones they go a block at a time
_SHRINKAGES = tuple(1.0 - 0.05 * step for step in range(13))


@dataclass(frozen=True, slots=True)
class GptqOptions:
    """damp: share of the mean diagonal of the inputs' moments that is added to it. act_order: groups are made of
    inputs in falling order of their moments, which the file then stores; otherwise groups stay and only the order in
    which they, and the inputs in them, are rounded follows the moments."""

    damp: float = 0.01
    act_order: bool = False


def gptq(weight: Tensor, moments: Tensor, grid: Grid, options: GptqOptions) -> IntegerWeight:
    """weight: float32 [N, K]; moments: mean x^T x over calibration inputs, float32 [K, K].

    Raises BatchInferError where the moments are not finite or, damped, not positive definite.
    """
    order = column_order(moments.diagonal(), grid, options.act_order)
    factor = inverse_factor(moments[order][:, order], options.damp)
    integers, scales, zeros = _solve(weight[:, order], factor, moments.diagonal()[order], grid)
    if options.act_order and grid.group_size < weight.shape[1]:
        return stored_weight(integers, scales, zeros, grid, order)
    back = torch.argsort(order)
    groups_back = back[:: grid.group_size] // grid.group_size
    return stored_weight(integers[:, back], scales[:, groups_back], zeros[:, groups_back], grid)


def column_order(diagonal: Tensor, grid: Grid, act_order: bool) -> Tensor:
    """The columns, int64 [K], as they are rounded: large moments first, across groups or (act_order false) group by
    group by their mean and within each."""
    if act_order:
        return torch.argsort(diagonal, descending=True, stable=True)
    groups = in_groups(diagonal, grid)
    within = torch.argsort(groups, dim=1, descending=True, stable=True)
    by_mean = torch.argsort(groups.mean(1), descending=True, stable=True)
    starts = torch.arange(0, len(diagonal), grid.group_size)
    return (within + starts[:, None])[by_mean].flatten()


def inverse_factor(moments: Tensor, damp: float) -> Tensor:
    """The upper triangular R with R^T R = (moments + damp * mean diagonal * I)^-1, float32 [K, K].

    A Cholesky factor of the matrix reversed, inverted and reversed again: no inverse is formed, and float64 keeps what
    large and nearly dependent inputs would cost.
    """
    mean = moments.diagonal().to(torch.float64).mean()
    if not torch.isfinite(mean):
        raise BatchInferError("the moments of a layer's inputs are not finite")
    damped = moments.flip(0, 1).to(torch.float64)
    damped.diagonal().add_(damp * mean if mean > 0 else 1.0)
    lower, failed = torch.linalg.cholesky_ex(damped)
    if failed:
        raise BatchInferError(f"the calibration inputs depend on each other too much for --damp {damp:g}; raise it")
    identity = torch.eye(len(damped), dtype=torch.float64, out=damped)
    return torch.linalg.solve_triangular(lower, identity, upper=False, out=identity).to(torch.float32).flip(0, 1)


def _solve(weight: Tensor, factor: Tensor, importance: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Integers [N, K], scales and zeros [N, K / group_size], for columns in the order given."""
    size = grid.group_size
    left = weight.clone()
    integers = torch.empty_like(weight)
    scales = torch.empty(weight.shape[0], weight.shape[1] // size)
    zeros = torch.empty_like(scales)
    for start, stop in _blocks(weight.shape[1], size):
        block = left[:, start:stop].T.contiguous()  # a column's weights lie together
        errors = torch.empty_like(block)
        for column in range(start, stop):
            at = column - start
            group = column // size
            if column % size == 0:
                rows = block[at : at + size] if column + size <= stop else left[:, column : column + size].T
                found = best_fit(rows.T, importance[column : column + size], grid)
                scales[:, group], zeros[:, group] = found[0][:, 0], found[1][:, 0]
                scale, zero = scales[:, group].clone(), zeros[:, group].clone()
            value = block[at]
            codes = to_integers(value, scale, zero, grid)
            integers[:, column] = codes
            errors[at] = (value - (codes - zero) * scale) / factor[column, column]
            block[at + 1 :].addr_(factor[column, column + 1 : stop], errors[at], alpha=-1.0)
        left[:, stop:].addmm_(errors.T, factor[start:stop, stop:], alpha=-1.0)
    return integers, scales, zeros


def _blocks(num_columns: int, group_size: int) -> list[tuple[int, int]]:
    """Whole groups in a block, or whole blocks in a group."""
    size = _BLOCK // group_size * group_size or max(d for d in range(1, _BLOCK + 1) if group_size % d == 0)
    return [(start, min(start + size, num_columns)) for start in range(0, num_columns, size)]


def best_fit(groups: Tensor, importance: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Scales and zero points, [N, 1], of the range, shrunk or not, with the least squared error of each group.

    groups: [N, group_size]; importance: weights of the inputs' errors, [group_size].
    """
    low, high = group_range(groups)
    best: tuple[Tensor, Tensor] = fit(low, high, grid)
    least = _error(groups, *best, importance, grid)
    for shrinkage in _SHRINKAGES[1:]:
        tried = fit(low * shrinkage, high * shrinkage, grid)
        error = _error(groups, *tried, importance, grid)
        is_better = error < least
        least = torch.where(is_better, error, least)
        best = (torch.where(is_better, tried[0], best[0]), torch.where(is_better, tried[1], best[1]))
    return best


def _error(groups: Tensor, scales: Tensor, zeros: Tensor, importance: Tensor, grid: Grid) -> Tensor:
    return (rounded(groups, scales, zeros, grid).sub_(groups).square_() @ importance)[:, None]
