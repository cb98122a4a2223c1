"""Weights as checkpoints store them: their numbers against the formula element by element, stacks of rows, and each
field's refusal."""

import dataclasses
import math

import pytest
import torch
from batchinfer.kernels.quantized_linear.stored import Fp8Weight, IntegerWeight, concatenate


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def integer_weight(rows=6, columns=20, bits=4, group_size=8, use_offsets=False, dtype=torch.float16, permute=False):
    shape = (rows, math.ceil(columns / group_size))
    zeros = torch.randint(0, 2**bits, shape).float()
    offsets = torch.randn(shape).to(dtype)
    return IntegerWeight(
        bits,
        group_size,
        torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8),
        torch.rand(shape).to(dtype),
        None if use_offsets else zeros,
        offsets if use_offsets else None,
        torch.randperm(columns) if permute else None,
    )


def fp8_weight(rows, columns, block):
    grid = (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    return Fp8Weight(torch.randn(rows, columns).to(torch.float8_e4m3fn), torch.rand(grid) + 0.1, block)


def by_formula(weight):
    """Element by element; each of the operations is rounded to float32."""
    rows, columns = weight.values.shape
    expected = torch.zeros(rows, columns)
    for n in range(rows):
        for j in range(columns):
            g = j // weight.group_size
            value, scale = weight.values[n, j].float(), weight.scales[n, g].float()
            if weight.zeros is not None:
                result = (value - weight.zeros[n, g]) * scale
            else:
                result = value * scale + weight.offsets[n, g].float()
            expected[n, j if weight.permutation is None else weight.permutation[j]] = result
    return expected


@pytest.mark.parametrize("permute", [False, True])
@pytest.mark.parametrize("use_offsets", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(2, 20), (3, 8), (4, 5), (8, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_integers_mean_what_the_formula_says(dtype, bits, group_size, use_offsets, permute):
    weight = integer_weight(bits=bits, group_size=group_size, use_offsets=use_offsets, dtype=dtype, permute=permute)
    expected = by_formula(weight)
    assert torch.equal(weight.dequantize(), expected)
    assert torch.equal(weight.dequantize(torch.bfloat16), expected.bfloat16())


@pytest.mark.parametrize("block", [(5, 7), (1, 7), (2, 3), (4, 4), (1, 1)])
def test_fp8_means_its_value_times_the_scale_of_its_block(block):
    weight = fp8_weight(5, 7, block)
    expected = torch.zeros(5, 7)
    for n in range(5):
        for k in range(7):
            expected[n, k] = weight.values[n, k].float() * weight.scales[n // block[0], k // block[1]]
    assert torch.equal(weight.dequantize(), expected)
    assert torch.equal(weight.dequantize(torch.float16), expected.half())


def test_more_rows_than_are_dequantised_at_once():
    weight = integer_weight(rows=2500, columns=4, group_size=2, permute=True)
    assert torch.equal(weight.dequantize(), by_formula(weight))
    fp8 = fp8_weight(2500, 4, (1024, 4))
    assert torch.equal(fp8.dequantize()[2499], fp8.values[2499].float() * fp8.scales[2])


@pytest.mark.parametrize("use_offsets", [False, True])
def test_stacked_integers(use_offsets):
    parts = [integer_weight(rows, use_offsets=use_offsets) for rows in (6, 2, 3)]
    parts = [dataclasses.replace(part, permutation=torch.arange(19, -1, -1)) for part in parts]
    assert torch.equal(concatenate(parts).dequantize(), torch.cat([part.dequantize() for part in parts]))


@pytest.mark.parametrize(
    ("blocks", "height"),
    [
        (((8, 12), (4, 12), (6, 12)), 1),  # a scale a tensor
        (((1, 12), (1, 12), (1, 12)), 1),
        (((4, 5), (4, 5), (4, 5)), 4),  # whole blocks but for the last
        (((3, 5), (2, 5), (6, 5)), 1),
    ],
)
def test_stacked_fp8(blocks, height):
    parts = [fp8_weight(rows, 12, block) for rows, block in zip((8, 4, 6), blocks, strict=True)]
    stacked = concatenate(parts)
    assert stacked.block[0] == height
    assert torch.equal(stacked.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_stacks_of_what_does_not_fit_are_refused():
    weight = integer_weight(permute=True)
    others = {
        "Fp8Weight": fp8_weight(2, 20, (1, 20)),
        "20 and 12 inputs": integer_weight(columns=12),
        "bits 4 and 8": dataclasses.replace(weight, bits=8),
        "group_size 8 and 20": integer_weight(group_size=20),
        "zeros .* offsets": integer_weight(use_offsets=True),
        "permutation": integer_weight(),
    }
    for message, other in others.items():
        with pytest.raises(ValueError, match=message):
            concatenate([weight, other])
    with pytest.raises(ValueError, match=r"block \(2, 20\) and \(2, 5\)"):
        concatenate([fp8_weight(2, 20, (2, 20)), fp8_weight(2, 20, (2, 5))])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("bits", 5, "bits must be one of"),
        ("bits", 3, "values must be below 8 with 3 bits, not 15"),
        ("group_size", 0, "group_size must be from 1 to 20"),
        ("group_size", 21, "group_size must be from 1 to 20"),
        ("group_size", 10, r"scales must be \[6, 2\], not \[6, 3\]"),
        ("values", torch.zeros(6, 20), "values must be uint8, not float32"),
        ("values", torch.zeros(6, 0, dtype=torch.uint8), "values must be a matrix"),
        ("scales", torch.zeros(6, 3, dtype=torch.float64), "scales must be float16 or bfloat16 or float32"),
        ("zeros", torch.zeros(6, 2), r"zeros must be \[6, 3\], not \[6, 2\]"),
        ("zeros", torch.zeros(6, 3).half(), "zeros must be float32"),
        ("zeros", None, "exactly one of zeros and offsets"),
        ("offsets", torch.zeros(6, 3), "exactly one of zeros and offsets"),
        ("permutation", torch.arange(19), r"permutation must be int64 \[20\], not int64 \[19\]"),
        ("permutation", torch.zeros(20, dtype=torch.int64), "each number from 0 to 19 once"),
    ],
)
def test_a_field_of_integers_that_does_not_fit_is_named(field, value, message):
    weight = integer_weight()
    weight.values[0, 0] = 15
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(weight, **{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("values", torch.zeros(6, 20), "values must be float8_e4m3fn"),
        ("values", torch.full((6, 20), math.nan).to(torch.float8_e4m3fn), "NaN"),
        ("scales", torch.ones(2, 2), r"scales must be \[2, 3\], not \[2, 2\]"),
        ("scales", torch.ones(2, 3).half(), "scales must be float32"),
        ("block", (4, 21), "block must be from"),
    ],
)
def test_a_field_of_fp8_that_does_not_fit_is_named(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(fp8_weight(6, 20, (4, 8)), **{field: value})
