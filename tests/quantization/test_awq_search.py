"""The scale search against trying everything, its ranges against a naive search, and that neither ever loses."""

import itertools

import torch

from batchinfer.quantization.awq_search import search_range, search_scales
from batchinfer.quantization.rounding import Grid, nearest, round_to_nearest

GRID = Grid(4, 8, False)


def problem(seed=0, tokens=64, columns=16, rows=6):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=generator) * torch.logspace(-1.5, 1, columns)
    return x, torch.randn(rows, columns, generator=generator) * 0.1


def output_loss(x, source):
    return lambda tried: float(((tried[0] - source) @ x.T).square().mean())


def published_scales(x, source, ratio):
    """AutoAWQ's formula, written out."""
    magnitudes = x.abs().mean(0)
    relative = torch.zeros(source.shape[1])
    for row in source:
        for start in range(0, len(row), GRID.group_size):
            group = row[start : start + GRID.group_size].abs()
            relative[start : start + GRID.group_size] += group / (group.max() + 1e-6) / len(source)
    scales = (magnitudes**ratio / (relative ** (1 - ratio) + 1e-4)).clamp_min(1e-4)
    return scales / (scales.max() * scales.min()).sqrt()


def test_finds_the_best_of_all_ratios():
    x, source = problem()
    found = search_scales(x.abs().mean(0), [source], GRID, output_loss(x, source))
    tried = [torch.ones(16), *(published_scales(x, source, step / 20) for step in range(20))]
    losses = [output_loss(x, source)([nearest(source * scales, GRID) / scales]) for scales in tried]
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(losses), rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(found.scales, tried[losses.index(min(losses))])
    assert 1 < losses.index(min(losses)) < 20  # neither rounding nor the end of the grid, so that the test tells


def test_never_loses_more_than_rounding():
    for seed in range(20):
        x, source = problem(seed)
        loss = output_loss(x, source)
        found = search_scales(x.abs().mean(0), [source], GRID, loss)
        best = loss([nearest(source * found.scales, GRID) / found.scales])
        assert best <= loss([nearest(source, GRID)])


def group_losses(made, source, x):
    """Of each row and group: what its error adds to the output by itself."""
    errors = (made.dequantize() - source).unflatten(1, (-1, GRID.group_size))
    groups = x.unflatten(1, (-1, GRID.group_size))
    return torch.einsum("tgi,ngi->ngt", groups, errors).square().mean(-1)


def test_range_is_never_worse_than_the_whole_and_near_the_best_of_all_cuts():
    x, source = problem(columns=16, rows=24)
    products = torch.stack([part.T @ part / len(x) for part in x.split(8, 1)])
    found = group_losses(round_to_nearest(source, GRID, search_range(source, products, GRID)), source, x)
    whole = group_losses(round_to_nearest(source, GRID), source, x)
    assert (found <= whole * (1 + 1e-4) + 1e-12).all()
    groups = source.unflatten(1, (-1, 8))
    low, high = groups.amin(-1, keepdim=True).clamp_max(0), groups.amax(-1, keepdim=True).clamp_min(0)
    every = [
        group_losses(round_to_nearest(source, GRID, (low * (1 - a / 20), high * (1 - b / 20))), source, x)
        for a, b in itertools.product(range(10), range(10))
    ]
    best = torch.stack(every).amin(0)
    assert found.sum() < 0.9 * whole.sum()
    assert found.sum() < 1.5 * best.sum()


def test_symmetric_ranges_are_cut_on_both_sides():
    x, source = problem(rows=24)
    grid = Grid(4, 8, True)
    products = torch.stack([part.T @ part / len(x) for part in x.split(8, 1)])
    low, high = search_range(source, products, grid)
    found = group_losses(round_to_nearest(source, grid, (low, high)), source, x)
    assert (found <= group_losses(round_to_nearest(source, grid), source, x) * (1 + 1e-4) + 1e-12).all()
