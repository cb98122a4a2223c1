"""Rounding to nearest against a version that goes through one element after the other, and what scales may be."""

import math

import pytest
import torch

from batchinfer.quantization.rounding import Grid, nearest, round_to_fp8, round_to_nearest, storable

GRIDS = [Grid(4, 16, False), Grid(4, 16, True), Grid(3, 8, False), Grid(8, 32, False), Grid(2, 8, True)]


def weight(rows=5, columns=32, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def naive_group(group, grid):
    """(integers, scale, zero) of a list of numbers, in Python's own arithmetic but for the rounding of scales."""
    top = 2**grid.bits - 1
    low, high = min(0.0, *group), max(0.0, *group)
    if grid.symmetric:
        scale = float(storable(torch.tensor(2 * max(-low, high) / top)))
        zero = 2 ** (grid.bits - 1)
    else:
        scale = float(storable(torch.tensor((high - low) / top)))
        zero = min(max(round(-low / scale), 0), top)
    return [min(max(round(value / scale) + zero, 0), top) for value in group], scale, zero


@pytest.mark.parametrize("grid", GRIDS)
def test_equals_one_element_after_the_other(grid):
    source = weight()
    made = round_to_nearest(source, grid)
    for row, values in enumerate(source.tolist()):
        for group in range(len(values) // grid.group_size):
            at = slice(group * grid.group_size, (group + 1) * grid.group_size)
            integers, scale, zero = naive_group(values[at], grid)
            assert made.values[row, at].tolist() == integers
            assert made.scales[row, group].item() == scale
            assert made.zeros[row, group].item() == zero


@pytest.mark.parametrize("grid", GRIDS)
def test_error_is_half_a_step_at_most(grid):
    source = weight()
    made = round_to_nearest(source, grid)
    steps = made.scales.float().repeat_interleave(grid.group_size, 1)
    slack = 1.1 if grid.symmetric else 1.0 + 2**-7 * 2**grid.bits  # the last step, and scales of 8 bits
    assert ((made.dequantize() - source).abs() <= steps * 0.5 * slack + 1e-9).all()
    torch.testing.assert_close(nearest(source, grid), made.dequantize(), rtol=0, atol=0)


def test_scales_are_numbers_of_both_16_bit_formats():
    scales = storable(torch.logspace(-9, 3, 500))
    assert torch.equal(scales.half().float(), scales)
    assert torch.equal(scales.bfloat16().float(), scales)
    assert scales.min() == 2.0**-24


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_group_of_zeros_stays_zero(symmetric):
    source = weight()
    source[2, 16:] = 0
    made = round_to_nearest(source, Grid(4, 16, symmetric))
    assert (made.dequantize()[2, 16:] == 0).all()


def test_zero_points_reach_both_ends():
    source = weight().abs()
    source[1] *= -1
    made = round_to_nearest(source, Grid(4, 16, False))
    assert (made.zeros[0] == 0).all()
    assert (made.zeros[1] == 15).all()


def test_lowest_zero_is_kept_without_cutting_the_top():
    source = weight().abs()
    made = round_to_nearest(source, Grid(4, 16, False, lowest_zero=1))
    assert made.zeros.min() == 1
    steps = made.scales.float().repeat_interleave(16, 1)
    assert ((made.dequantize() - source).abs() <= steps * 0.55).all()


def test_limits_cut_what_is_outside():
    source = weight()
    limits = (torch.full((5, 2, 1), -0.03), torch.full((5, 2, 1), 0.03))
    made = round_to_nearest(source, Grid(4, 16, False), limits)
    assert made.dequantize().abs().max() < 0.035
    assert source.abs().max() > 0.1


def test_fp8_rounds_to_the_nearest_number_of_e4m3():
    source = weight()
    made = round_to_fp8(source)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()]
    for row, scale in zip(source, made.scales[:, 0], strict=True):
        assert float(scale) == pytest.approx(float(row.abs().max()) / 448, rel=2**-8)
    wanted = source / made.scales
    distance = (wanted[:, :, None] - numbers).abs().amin(-1)
    found = (made.values.float() - wanted).abs()
    beyond = (wanted.abs() - 448).clamp_min(0)
    assert torch.all(found <= distance + 1e-6 * wanted.abs() + beyond)
    assert math.isfinite(float(made.dequantize().sum()))
