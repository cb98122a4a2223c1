"""GPTQ against a version that forms the inverse anew for every column, and what it gains."""

import pytest
import torch

from batchinfer.errors import BatchInferError
from batchinfer.quantization.calibrate_moments import InputMoments
from batchinfer.quantization.gptq_solve import GptqOptions, best_fit, column_order, gptq, inverse_factor
from batchinfer.quantization.rounding import Grid, round_to_nearest


def inputs(tokens=200, columns=32, seed=1):
    """Correlated, of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    return mixed * torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=generator)]


def weight(rows=6, columns=32):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(2)) * 0.1


def moments(x):
    return x.T @ x / len(x)


def naive(source, h, grid, options):
    """Frantar et al.'s equations (1) to (3): after each column the rest is corrected by the inverse of what is left of
    the damped moments. Returns the weight that results, in the order of the inputs."""
    columns = source.shape[1]
    order = column_order(h.diagonal(), grid, options.act_order).tolist()
    damped = h.double() + options.damp * h.diagonal().double().mean() * torch.eye(columns, dtype=torch.float64)
    left = source.double().clone()
    result = torch.empty_like(left)
    for position, column in enumerate(order):
        rest = order[position:]
        inverse = torch.linalg.inv(damped[rest][:, rest])
        if position % grid.group_size == 0:
            group = rest[: grid.group_size]
            scales, zeros = best_fit(left[:, group].float(), h.diagonal()[group], grid)
            scales, zeros = scales[:, 0].double(), zeros[:, 0].double()
        codes = ((left[:, column] / scales).round() + zeros).clamp(0, grid.highest)
        result[:, column] = (codes - zeros) * scales
        error = (left[:, column] - result[:, column]) / inverse[0, 0]
        left[:, rest] -= error[:, None] * inverse[0]
    return result.float()


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("group_size", "columns"), [(8, 32), (32, 32), (64, 192), (192, 192)])
def test_equals_the_version_without_tricks(group_size, columns, symmetric, act_order):
    source, h = weight(columns=columns), moments(inputs(columns=columns, tokens=400))
    grid, options = Grid(4, group_size, symmetric), GptqOptions(0.01, act_order)
    found = gptq(source, h, grid, options).dequantize()
    different = (found - naive(source, h, grid, options)).abs() > 1e-6
    assert different.float().mean() < 0.01  # a tie that float32 decides otherwise moves what follows


def test_act_order_alone_needs_a_permutation():
    source, h = weight(), moments(inputs())
    assert gptq(source, h, Grid(4, 8, True), GptqOptions()).permutation is None
    made = gptq(source, h, Grid(4, 8, True), GptqOptions(act_order=True))
    assert made.permutation.tolist() == torch.argsort(h.diagonal(), descending=True).tolist()
    assert gptq(source, h, Grid(4, 32, True), GptqOptions(act_order=True)).permutation is None  # one group


@pytest.mark.parametrize("symmetric", [False, True])
def test_loses_less_of_the_output_than_rounding(symmetric):
    source, x = weight(), inputs()
    grid = Grid(4, 8, symmetric)

    def loss(made):
        return float(((made.dequantize() - source) @ x.T).square().mean())

    assert loss(gptq(source, moments(x), grid, GptqOptions())) < 0.6 * loss(round_to_nearest(source, grid))


def test_inverse_factor():
    h = moments(inputs())
    factor = inverse_factor(h, 0.05)
    damped = h + 0.05 * h.diagonal().mean() * torch.eye(32)
    torch.testing.assert_close(factor.T @ factor @ damped, torch.eye(32), atol=1e-3, rtol=0)
    assert torch.equal(factor, factor.triu())


def test_inputs_that_never_come_change_nothing_else():
    x = inputs()
    x[:, 3] = 0
    made = gptq(weight(), moments(x), Grid(4, 8, False), GptqOptions())
    assert made.dequantize().isfinite().all()
    silent = gptq(weight(), torch.zeros(32, 32), Grid(4, 8, False), GptqOptions())
    assert silent.dequantize().isfinite().all()


def test_moments_that_are_not_finite_are_refused():
    with pytest.raises(BatchInferError, match="not finite"):
        gptq(weight(), torch.full((32, 32), torch.nan), Grid(4, 8, False), GptqOptions())


@pytest.mark.parametrize("columns", [96, 1040])
def test_moments_add_up(columns):
    x = inputs(columns=columns, tokens=64)
    whole, blocks = InputMoments(columns), InputMoments(columns, 16)
    for part in (x[:10], x[10:].to(torch.bfloat16)):
        whole.add(part)
        blocks.add(part)
    rounded = torch.cat([x[:10], x[10:].to(torch.bfloat16).float()]).double()
    wanted = (rounded.T @ rounded / 64).float()
    torch.testing.assert_close(whole.products, wanted, rtol=1e-4, atol=1e-3)
    for group in range(columns // 16):
        at = slice(16 * group, 16 * group + 16)
        torch.testing.assert_close(blocks.products[group], wanted[at, at], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(whole.mean_magnitudes, rounded.abs().mean(0).float(), rtol=1e-4, atol=1e-4)
