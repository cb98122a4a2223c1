"""Triton backend of fp8_linear: products of e4m3, for devices whose matrix instructions take it. Weights of 4 bits
become e4m3 in registers; activations are quantised by a kernel of their own before.

Matrix instructions add up e4m3 with few bits on some devices (about 14 on sm_90), so sums start anew at each group of
inputs, and each 128 of them, and are joined in float32.
"""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from batchinfer.kernels.common import triton_targets
from batchinfer.kernels.common.triton_codes import decode, encode
from batchinfer.kernels.quantized_linear import fp8, gpu_tiles, gpu_weight
from batchinfer.kernels.quantized_linear.gpu_dequantize import parameters_of
from batchinfer.kernels.quantized_linear.gpu_tiles import BLOCK_N, tiles
from batchinfer.kernels.quantized_linear.gpu_tiles import MOST_ROWS as _MOST_ROWS
from batchinfer.kernels.quantized_linear.gpu_weight import GpuWeight
from batchinfer.kernels.quantized_linear.stored import Fp8Weight, IntegerWeight
from torch import Tensor

MOST_ROWS: tl.constexpr = tl.constexpr(_MOST_ROWS)
TINY: tl.constexpr = tl.constexpr(fp8.TINY)
LARGEST: tl.constexpr = tl.constexpr(fp8.LARGEST)
CENTRE: tl.constexpr = tl.constexpr(8.0)  # what is taken off the numbers where offsets, not zeros, go with them
_TILES = {
    "ampere": tiles(64, 8, 8, 3),  # what Triton's interpreter counts as
    "small": tiles(64, 8, 8, 3),
    "hopper": tiles(128, 8, 8, 4),
    "blackwell": tiles(64, 8, 8, 3),
}


def check_device() -> None:
    """Raises ValueError where the device has no products of e4m3."""
    target = triton_targets.current()
    if not target.has_e4m3 and not triton_targets.is_interpreted():
        able = ", ".join(known.name for known in triton_targets.TARGETS.values() if known.has_e4m3)
        raise ValueError(f"products in fp8 need a GPU that has e4m3 ({able}), and this one counts as {target.name}")


def pack_weight(weight: IntegerWeight | Fp8Weight) -> GpuWeight:
    """As gpu_weight.pack_weight, with zeros whose differences are exact in e4m3, or offsets."""
    return gpu_weight.pack_weight(fp8.centred(weight) if isinstance(weight, IntegerWeight) else weight)


@triton.jit(do_not_specialize=["num_rows", "x_stride"], do_not_specialize_on_alignment=["x_stride"])
def _quantize_tokens(
    x_ptr,  # [num_rows, K], rows x_stride * ROW_UNIT apart
    codes_ptr,  # uint8 [num_rows, INPUTS]
    scales_ptr,  # float32 [num_rows]
    sums_ptr,  # float32 [INPUTS / RUN, rows filled up to whole MOST_ROWS], of each run's codes, or None
    num_rows,
    x_stride,
    K: tl.constexpr,
    INPUTS: tl.constexpr,
    RUN: tl.constexpr,
    ROW_UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token."""
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride * ROW_UNIT + k, k < K, 0.0).to(tl.float32)
    magnitude = tl.abs(x)
    most = tl.max(magnitude, axis=0)
    has_fault = tl.max(tl.where(magnitude < float("inf"), 0, 1), axis=0) > 0
    inverse = tl.where(most > TINY, tl.math.div_rn(LARGEST, tl.maximum(most, TINY)), 0.0)
    x = tl.where(has_fault, 0.0, x * inverse)
    codes = encode(x, "e4m3", LARGEST)
    tl.store(codes_ptr + row.to(tl.int64) * INPUTS + k, codes, k < INPUTS)
    scale = tl.where(most > TINY, tl.math.div_rn(most, LARGEST), 0.0)
    tl.store(scales_ptr + row, tl.where(has_fault, float("nan"), scale))
    if sums_ptr is not None:
        numbers = tl.reshape(decode(codes, "e4m3", False).to(tl.float32), (BLOCK // RUN, RUN))
        run = tl.arange(0, BLOCK // RUN)
        tl.store(_sums_of(sums_ptr, run, num_rows) + row, tl.sum(numbers, axis=1), run < INPUTS // RUN)


@triton.jit
def _sums_of(sums_ptr, run, num_rows):
    """Filled rows let whole vectors be loaded, without a mask."""
    return sums_ptr + run * ((num_rows + MOST_ROWS - 1) // MOST_ROWS * MOST_ROWS).to(tl.int64)


@triton.jit(do_not_specialize=["num_rows", "pairs", "num_groups"])
def _fp8_linear(
    codes_ptr,  # e4m3 [num_rows, pairs * 2 * RUN], as _quantize_tokens writes it, like the following
    x_scales_ptr,
    x_sums_ptr,
    values_ptr,  # uint8, as GpuWeight's, like the parameters
    parameters,  # (scales, zeros, offsets)
    bias_ptr,  # float32 [num_outputs] or None
    out_ptr,  # [parts of the inputs, num_rows, num_outputs], contiguous
    num_rows,
    num_outputs,
    pairs,  # of runs of inputs
    num_groups,
    KIND: tl.constexpr,  # int4 or e4m3
    RUN: tl.constexpr,
    GROUP_RUNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    share = tl.cdiv(pairs, tl.num_programs(2))
    row_bytes = pairs * (RUN if KIND == "int4" else 2 * RUN)
    k = tl.arange(0, RUN)
    values = values_ptr + (n.to(tl.int64) * row_bytes)[:, None] + k[None, :]
    x = codes_ptr + (m.to(tl.int64) * (pairs * 2 * RUN))[None, :] + k[:, None]
    is_n, is_m = n < num_outputs, m < num_rows
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = tl.program_id(2) * share
    for pair in range(first, tl.minimum(first + share, pairs)):
        run = 2 * pair
        place = parameters_of(run, n, num_outputs, num_groups, GROUP_RUNS)
        next_place = parameters_of(run + 1, n, num_outputs, num_groups, GROUP_RUNS)
        if KIND == "int4":
            packed = tl.load(values + pair * RUN, is_n[:, None], 0)
            low = _less_zero(packed & 15, parameters, place, is_n)
            high = _less_zero(packed >> 4, parameters, next_place, is_n)
        else:
            low = tl.load(values + run * RUN, is_n[:, None], 0).to(tl.float8e4nv, bitcast=True)
            high = tl.load(values + run * RUN + RUN, is_n[:, None], 0).to(tl.float8e4nv, bitcast=True)
        sums = tl.dot(low, tl.load(x + run * RUN, is_m[None, :], 0.0))
        if GROUP_RUNS % 2 != 0:
            total += sums * tl.load(parameters[0] + place, is_n, 0.0)[:, None]
            sums = tl.dot(high, tl.load(x + run * RUN + RUN, is_m[None, :], 0.0))
        else:
            sums = tl.dot(high, tl.load(x + run * RUN + RUN, is_m[None, :], 0.0), sums)
        total += sums * tl.load(parameters[0] + next_place, is_n, 0.0)[:, None]
        if parameters[2] is not None:
            total += _offset(parameters, place, is_n) * tl.load(_sums_of(x_sums_ptr, run, num_rows) + m)[None, :]
            x_sums = tl.load(_sums_of(x_sums_ptr, run + 1, num_rows) + m)
            total += _offset(parameters, next_place, is_n) * x_sums[None, :]
    total *= tl.load(x_scales_ptr + m, is_m, 0.0)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, is_n, 0.0)[:, None]
    row = tl.program_id(2).to(tl.int64) * num_rows + m
    tl.store(
        out_ptr + row[None, :] * num_outputs + n[:, None],
        total.to(out_ptr.dtype.element_ty),
        is_n[:, None] & is_m[None, :],
    )


@triton.jit
def _less_zero(values, parameters, place, is_n):
    """Numbers of 4 bits less their zeros, or CENTRE, in e4m3: exact, as are the float16 between, whose last bits are
    those of 1024 + value."""
    whole = (values.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    if parameters[1] is None:
        less = whole - tl.full((1, 1), 1024.0 + CENTRE, tl.float16)
    else:
        less = whole - (1024.0 + tl.load(parameters[1] + place, is_n, 0.0)).to(tl.float16)[:, None]
    return less.to(tl.float8e4nv)


@triton.jit
def _offset(parameters, place, is_n):
    """float32 [BLOCK_N, 1]: what each unit of activations adds where CENTRE was taken off the numbers."""
    scale = tl.load(parameters[0] + place, is_n, 0.0)
    return (tl.load(parameters[2] + place, is_n, 0.0) + CENTRE * scale)[:, None]


def fp8_linear(x: Tensor, weight: GpuWeight, bias: Tensor | None, out: Tensor) -> None:
    """See the package's `fp8_linear`."""
    num_rows, n = len(x), weight.num_outputs
    if not num_rows:
        return
    if weight.permutation is not None:
        x = x[:, weight.permutation]
    codes, scales, sums = _quantized(x, weight)
    pairs = codes.shape[1] // (2 * weight.run)
    split = gpu_tiles.splits(n, num_rows, pairs)
    parts = gpu_tiles.parts_of(split, out)
    block_m, options = gpu_tiles.tile(num_rows, _TILES)
    _fp8_linear[(triton.cdiv(n, BLOCK_N), triton.cdiv(num_rows, block_m), split)](
        *(codes.view(torch.float8_e4m3fn), scales, sums, weight.values),
        *((weight.scales, weight.zeros, weight.offsets), bias if split == 1 else None, parts),
        *(num_rows, n, pairs),
        **{"KIND": weight.kind.name.lower(), "BLOCK_N": BLOCK_N, "BLOCK_M": block_m},
        **weight.grouping(),
        **options,
        **triton_targets.FUSED,
    )
    gpu_tiles.join(parts, bias, out)


def _quantized(x: Tensor, weight: GpuWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes of x, uint8 [n, whole pairs of runs], their scales [n], and where the weight has offsets sums by run."""
    num_rows, k = x.shape
    x, row_unit = gpu_tiles.dense_rows(x)
    inputs = triton.cdiv(k, 2 * weight.run) * 2 * weight.run
    codes = torch.empty(num_rows, inputs, dtype=torch.uint8, device=x.device)
    scales = torch.empty(num_rows, device=x.device)
    filled = triton.cdiv(num_rows, _MOST_ROWS) * _MOST_ROWS
    sums = None if weight.offsets is None else torch.empty(inputs // weight.run, filled, device=x.device)
    block = triton.next_power_of_2(inputs)
    _quantize_tokens[(num_rows,)](
        *(x, codes, scales, sums, num_rows, x.stride(0) // row_unit),
        **{"K": k, "INPUTS": inputs, "RUN": weight.run, "ROW_UNIT": row_unit, "BLOCK": block},
        num_warps=max(1, min(16, block // 512)),
        **triton_targets.FUSED,
    )
    return codes, scales, sums
