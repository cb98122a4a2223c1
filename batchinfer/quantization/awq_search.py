"""AWQ: the scale of each input that loses least when the weight is rounded, and the range of each group. Called by
conversion/. Source: Lin et al., arXiv 2306.00978; ratios and ranges tried are AutoAWQ's and finer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.quantization.rounding import Grid, fit, group_range, in_groups, nearest, rounded

NUM_RATIOS = 20
_SMALLEST = 1e-4
_CUTS = tuple(step / 20 for step in range(10))  # shares of a group's range


@dataclass(frozen=True, slots=True)
class ScaleSearch:
    """scales: the best, float32 [K]. losses: of all ratios tried; the first is rounding without scales."""

    scales: Tensor
    losses: tuple[float, ...]


def search_scales(
    magnitudes: Tensor, weights: Sequence[Tensor], grid: Grid, loss: Callable[[Sequence[Tensor]], float]
) -> ScaleSearch:
    """magnitudes: mean |x| of each input, [K]. weights: those of the modules that share the inputs, float32 [N_i, K].
    loss: of the output when other weights stand for them."""
    candidates = [torch.ones_like(magnitudes), *candidate_scales(magnitudes, weights, grid)]
    losses = [loss([scaled_and_rounded(weight, scales, grid) for weight in weights]) for scales in candidates]
    return ScaleSearch(candidates[min(range(len(losses)), key=losses.__getitem__)], tuple(losses))


def candidate_scales(magnitudes: Tensor, weights: Sequence[Tensor], grid: Grid) -> list[Tensor]:
    """mean|x|^r / (mean(|w| / groupmax)^(1-r) + 1e-4) of NUM_RATIOS ratios r, each around 1."""
    rows = sum(len(weight) for weight in weights)
    relative = sum((relative_magnitudes(weight, grid).sum(0) for weight in weights), torch.zeros(())) / rows
    found = []
    for step in range(NUM_RATIOS):
        ratio = step / NUM_RATIOS
        scales = (magnitudes**ratio / (relative ** (1 - ratio) + _SMALLEST)).clamp_min(_SMALLEST)
        found.append(scales / (scales.max() * scales.min()).sqrt())
    return found


def relative_magnitudes(weight: Tensor, grid: Grid) -> Tensor:
    """|w| divided by the largest |w| of its group, [N, K]."""
    groups = in_groups(weight.abs(), grid)
    return (groups / (groups.amax(-1, keepdim=True) + 1e-6)).flatten(1)


def scaled_and_rounded(weight: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    """What a weight [N, K] amounts to when its inputs are divided by `scales` and its columns multiplied."""
    return nearest(weight * scales, grid).div_(scales)


def search_range(weight: Tensor, products: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Lowest and highest value that each group shall span, [N, K / group_size, 1] each: its ends are cut, each by its
    own share, as loses least of the group's part of the output.

    weight: [N, K]; products: mean x^T x within groups, [K / group_size, group_size, group_size].
    """
    groups = in_groups(weight, grid)
    low, high = group_range(groups)
    best, least = (low, high), _loss(groups, low, high, products, grid)
    for side in (0, 1) if not grid.symmetric else (None,):
        start = best
        for cut in _CUTS[1:]:
            tried = (
                start[0] * (1 - cut) if side != 1 else start[0],
                start[1] * (1 - cut) if side != 0 else start[1],
            )
            loss = _loss(groups, *tried, products, grid)
            is_better = loss < least
            least = torch.where(is_better, loss, least)
            best = (torch.where(is_better, tried[0], best[0]), torch.where(is_better, tried[1], best[1]))
    return best


def _loss(groups: Tensor, low: Tensor, high: Tensor, products: Tensor, grid: Grid) -> Tensor:
    """dw (x^T x) dw^T of each group, [N, K / group_size, 1]."""
    scales, zeros = fit(low, high, grid)
    error = rounded(groups, scales, zeros, grid).sub_(groups).transpose(0, 1)
    return torch.bmm(error, products).mul_(error).sum(-1, keepdim=True).transpose(0, 1)
