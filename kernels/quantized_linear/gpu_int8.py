"""Triton backend of quantize_weight and quantized_linear: products of 8-bit integers with sums of 32 bits, weights as
the left operand. Activations are rotated and quantised by a kernel of their own before.

Groups, rotations and rounding are the reference's, so that results differ from it by the order of float32 sums only,
and where these make a number fall to the other side of a rounding border.
"""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from batchinfer.kernels.common import triton_targets
from batchinfer.kernels.common.triton_codes import encode
from batchinfer.kernels.quantized_linear import gpu_tiles, reference
from batchinfer.kernels.quantized_linear.gpu_tiles import BLOCK_N, tiles
from batchinfer.kernels.quantized_linear.gpu_tiles import MOST_ROWS as _MOST_ROWS
from batchinfer.kernels.quantized_linear.gpu_weight import Int8GpuWeight
from batchinfer.kernels.quantized_linear.weight import GROUP as _GROUP
from batchinfer.kernels.quantized_linear.weight import ROTATION as _ROTATION
from torch import Tensor

GROUP: tl.constexpr = tl.constexpr(_GROUP)
ROTATION: tl.constexpr = tl.constexpr(_ROTATION)
MOST_ROWS: tl.constexpr = tl.constexpr(_MOST_ROWS)
TINY: tl.constexpr = tl.constexpr(reference.TINY)
_FLOAT_BITS: tl.constexpr = tl.constexpr(0x4B400000)  # of 1.5 * 2^23: to it a float32 adds whole numbers up to 2^22
_FLOAT: tl.constexpr = tl.constexpr(12582912.0)
_TILES = {
    "ampere": tiles(64, 8, 8, 3),
    "small": tiles(64, 8, 8, 3),
    "hopper": tiles(128, 4, 8, 3),
    "blackwell": tiles(64, 4, 8, 3),
    "cdna3": tiles(128, 4, 8, 1),
}
_QUANTIZED_ROWS = 16  # that a program quantises


def quantize_weight(weight: Tensor) -> Int8GpuWeight:
    """See the package's `quantize_weight`."""
    num_outputs, num_inputs = weight.shape
    groups = -(-num_inputs // _GROUP)
    values = torch.empty(num_outputs, groups * _GROUP, dtype=torch.int8, device=weight.device)
    scales = torch.empty(groups, num_outputs, device=weight.device)
    for first in range(0, num_outputs, reference.ROWS_AT_ONCE):
        rows = slice(first, first + reference.ROWS_AT_ONCE)
        whole, scales_of_rows = reference.quantize(weight[rows])
        values[rows] = F.pad(whole, (0, groups * _GROUP - whole.shape[1])).to(torch.int8)
        scales[:, rows] = scales_of_rows.T
    return Int8GpuWeight(values, scales, num_outputs, num_inputs)


@triton.jit(do_not_specialize=["num_rows", "x_stride"], do_not_specialize_on_alignment=["x_stride"])
def _quantize_rows(
    x_ptr,  # [num_rows, num_inputs], rows x_stride * ROW_UNIT apart
    values_ptr,  # int8 [num_rows, groups * GROUP]
    scales_ptr,  # float32 [groups, rows filled up to whole MOST_ROWS]
    num_rows,
    x_stride,
    num_inputs,
    ROW_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One group of ROWS rows."""
    group = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = x_ptr + (row.to(tl.int64) * x_stride * ROW_UNIT)[:, None]
    is_row, first = (row < num_rows)[:, None], group * GROUP
    a = _rotated(at, first, is_row, num_inputs)
    b = _rotated(at, first + ROTATION, is_row, num_inputs)
    c = _rotated(at, first + 2 * ROTATION, is_row, num_inputs)
    most = tl.maximum(tl.maximum(_largest(a), _largest(b)), _largest(c))
    has_fault = tl.maximum(tl.maximum(_has_fault(a), _has_fault(b)), _has_fault(c))
    ones = tl.full((ROWS, 1), 1.0, tl.float32)
    inverse = tl.where(most > TINY, tl.math.div_rn(ones * 127, tl.maximum(most, TINY)), 0.0)
    out = values_ptr + row.to(tl.int64)[:, None] * (tl.num_programs(1) * GROUP) + first
    place = tl.arange(0, ROTATION)[None, :]
    tl.store(out + place, encode(a * inverse, "int8", 127.0).to(tl.int8, bitcast=True), is_row)
    tl.store(out + ROTATION + place, encode(b * inverse, "int8", 127.0).to(tl.int8, bitcast=True), is_row)
    tl.store(out + 2 * ROTATION + place, encode(c * inverse, "int8", 127.0).to(tl.int8, bitcast=True), is_row)
    scale = tl.where(most > TINY, tl.math.div_rn(most, ones * 127), 0.0)
    scale = tl.where(has_fault > 0, float("nan"), scale)
    tl.store(_scales_of(scales_ptr, group, num_rows) + row[:, None], scale, is_row)


@triton.jit
def _scales_of(scales_ptr, group, num_rows):
    """Filled rows let whole vectors be loaded, without a mask."""
    return scales_ptr + group * ((num_rows + MOST_ROWS - 1) // MOST_ROWS * MOST_ROWS).to(tl.int64)


@triton.jit
def _rotated(x_row, first, is_row, num_inputs):
    """float32 [ROWS, ROTATION]: inputs from `first` on, times 1/8 of the Hadamard matrix."""
    k = first + tl.arange(0, ROTATION)[None, :]
    x = tl.load(x_row + k, is_row & (k < num_inputs), 0.0)
    sign = tl.arange(0, ROTATION)[:, None] & tl.arange(0, ROTATION)[None, :]
    sign = sign ^ (sign >> 4)
    sign = sign ^ (sign >> 2)
    sign = (sign ^ (sign >> 1)) & 1  # whether an odd number of bits is common
    return tl.dot(x, (0.125 - 0.25 * sign.to(tl.float32)).to(x.dtype), input_precision="ieee")


@triton.jit
def _largest(x):
    return tl.max(tl.abs(x), axis=1, keep_dims=True)


@triton.jit
def _has_fault(x):
    """int32 [rows, 1]: 1 where there is NaN or infinity."""
    return tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), axis=1, keep_dims=True)


@triton.jit(do_not_specialize=["num_rows", "num_groups"])
def _int8_linear(
    x_ptr,  # int8 [num_rows, num_groups * GROUP], as _quantize_rows writes it, like the following
    x_scales_ptr,
    values_ptr,  # as Int8GpuWeight's, like the following
    scales_ptr,
    bias_ptr,  # float32 [num_outputs] or None
    out_ptr,  # [parts of the inputs, num_rows, num_outputs], contiguous
    num_rows,
    num_outputs,
    num_groups,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    share = tl.cdiv(num_groups, tl.num_programs(2))
    k = tl.arange(0, ROTATION)
    weight = values_ptr + (n.to(tl.int64) * (num_groups * GROUP))[:, None] + k[None, :]
    x = x_ptr + (m.to(tl.int64) * (num_groups * GROUP))[None, :] + k[:, None]
    is_n, is_m = n < num_outputs, m < num_rows
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = tl.program_id(2) * share
    for group in range(first, tl.minimum(first + share, num_groups)):
        # A sum of 192 products of bytes is below 2^22, so that the bits of a float32 count it.
        sums = tl.full((BLOCK_N, BLOCK_M), _FLOAT_BITS, tl.int32)
        for run in tl.static_range(GROUP // ROTATION):
            at = group * GROUP + run * ROTATION
            left = tl.load(weight + at, is_n[:, None], 0)
            sums = tl.dot(left, tl.load(x + at, is_m[None, :], 0), sums, out_dtype=tl.int32)
        scale = tl.load(scales_ptr + group * num_outputs + n, is_n, 0.0)
        x_scale = tl.load(_scales_of(x_scales_ptr, group, num_rows) + m)
        total += (sums.to(tl.float32, bitcast=True) - _FLOAT) * (scale[:, None] * x_scale[None, :])
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, is_n, 0.0)[:, None]
    row = tl.program_id(2).to(tl.int64) * num_rows + m
    tl.store(
        out_ptr + row[None, :] * num_outputs + n[:, None],
        total.to(out_ptr.dtype.element_ty),
        is_n[:, None] & is_m[None, :],
    )


def quantized_linear(x: Tensor, weight: Int8GpuWeight, bias: Tensor | None, out: Tensor) -> None:
    """See the package's `quantized_linear`."""
    num_rows, n = len(x), weight.num_outputs
    if not num_rows:
        return
    values, scales = quantize_rows(x)
    groups = len(scales)
    split = gpu_tiles.splits(n, num_rows, groups)
    parts = gpu_tiles.parts_of(split, out)
    block_m, options = gpu_tiles.tile(num_rows, _TILES)
    _int8_linear[(triton.cdiv(n, BLOCK_N), triton.cdiv(num_rows, block_m), split)](
        *(values, scales, weight.values, weight.scales, bias if split == 1 else None, parts),
        *(num_rows, n, groups),
        **{"BLOCK_N": BLOCK_N, "BLOCK_M": block_m},
        **options,
        **triton_targets.FUSED,
    )
    gpu_tiles.join(parts, bias, out)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As reference.quantize, but values int8, filled up to whole groups, and scales float32 [groups, n filled up]."""
    num_rows, k = x.shape
    x, row_unit = gpu_tiles.dense_rows(x)
    groups = triton.cdiv(k, _GROUP)
    values = torch.empty(num_rows, groups * _GROUP, dtype=torch.int8, device=x.device)
    scales = torch.empty(groups, triton.cdiv(num_rows, _MOST_ROWS) * _MOST_ROWS, device=x.device)
    _quantize_rows[(triton.cdiv(num_rows, _QUANTIZED_ROWS), groups)](
        *(x, values, scales, num_rows, x.stride(0) // row_unit, k),
        **{"ROW_UNIT": row_unit, "ROWS": _QUANTIZED_ROWS},
        num_warps=_QUANTIZED_ROWS * _ROTATION // 8 // triton_targets.current().warp_size,  # loads of 8 numbers
        **triton_targets.FUSED,
    )
    return values, scales
