"""Writes out the numbers that a GpuWeight stands for, by a Triton kernel. Called by gpu.py, for products of many rows,
which shares the arithmetic."""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from batchinfer.kernels.common import triton_targets
from batchinfer.kernels.common.triton_codes import decode
from batchinfer.kernels.quantized_linear.gpu_weight import GpuWeight

_NUMBERS = 4096  # of a run of inputs, that a program writes two of


@triton.jit
def small(values):
    """Whole numbers below 1024 to float32 without the slow conversion: they are the last bits of 1024 + value."""
    return (values.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True).to(tl.float32) - 1024.0


@triton.jit
def byte(values, KIND: tl.constexpr, NATIVE: tl.constexpr):
    return decode(values, "e4m3", NATIVE).to(tl.float32) if KIND == "e4m3" else small(values)


@triton.jit
def parameters_of(run, n, num_outputs, num_groups, GROUP_RUNS: tl.constexpr):
    """Where outputs n have their parameters for a run of inputs. GROUP_RUNS: as GpuWeight.grouping's."""
    # A run of filling belongs to no group.
    return n if GROUP_RUNS == 0 else tl.minimum(run // GROUP_RUNS, num_groups - 1) * num_outputs + n


@triton.jit
def scaled(values, parameters, place, mask):
    """float32 [rows, inputs]: what numbers stand for, by each row's parameters (scales, zeros, offsets) at `place`."""
    if parameters[1] is not None:
        values -= tl.load(parameters[1] + place, mask, 0.0)[:, None]
    values *= tl.load(parameters[0] + place, mask, 0.0)[:, None]
    if parameters[2] is not None:
        values += tl.load(parameters[2] + place, mask, 0.0)[:, None]
    return values


@triton.jit(do_not_specialize=["num_groups"])
def _dequantize(
    values_ptr,  # uint8, as GpuWeight's, like the parameters
    parameters,  # (scales, zeros, offsets)
    out_ptr,  # [num_outputs, num_inputs], contiguous
    num_outputs,
    num_inputs,
    num_groups,
    KIND: tl.constexpr,  # int4, uint8 or e4m3
    NATIVE: tl.constexpr,  # the device has e4m3
    RUN: tl.constexpr,
    GROUP_RUNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.program_id(1)
    row_bytes = tl.num_programs(1) * (RUN if KIND == "int4" else 2 * RUN)
    values = values_ptr + (n.to(tl.int64) * row_bytes)[:, None] + tl.arange(0, RUN)[None, :]
    out = out_ptr + (n.to(tl.int64) * num_inputs)[:, None]
    if KIND == "int4":
        packed = tl.load(values + pair * RUN, (n < num_outputs)[:, None], 0)
    for half in tl.static_range(2):
        run = 2 * pair + half
        if KIND == "int4":
            numbers = small(packed >> 4 if half else packed & 15)
        else:
            numbers = byte(tl.load(values + run * RUN, (n < num_outputs)[:, None], 0), KIND, NATIVE)
        place = parameters_of(run, n, num_outputs, num_groups, GROUP_RUNS)
        numbers = scaled(numbers, parameters, place, n < num_outputs)
        k = run * RUN + tl.arange(0, RUN)
        mask = (n < num_outputs)[:, None] & (k < num_inputs)[None, :]
        tl.store(out + k[None, :], numbers.to(out_ptr.dtype.element_ty), mask)


def dequantize(weight: GpuWeight, out: torch.Tensor) -> None:
    """Fills out, [num_outputs, num_inputs], with the bits of `weight.dequantize(out.dtype)`, but its columns in the
    order that they are stored in: column j is that of input permutation[j]."""
    pairs, rows = triton.cdiv(weight.num_inputs, 2 * weight.run), _NUMBERS // weight.run
    _dequantize[(triton.cdiv(weight.num_outputs, rows), pairs)](
        *(weight.values, (weight.scales, weight.zeros, weight.offsets), out, weight.num_outputs, weight.num_inputs),
        **{"KIND": weight.kind.name.lower(), "NATIVE": triton_targets.current().has_e4m3},
        **weight.grouping(),
        ROWS=rows,
        num_warps=4,
        enable_fp_fusion=False,  # a product and a sum are rounded one by one, as torch does
    )
