"""Triton backend of the package, of which packed_linear is here: weights are unpacked to the activations' format in
registers, as the left operand of the products, so that few rows of activations still fill the matrix instructions. From
LIBRARY_ROWS rows on a weight is written out once a call, and the library multiplies.

Which of the two ways a call takes, and how many parts the inputs are cut into, depend on the weight and the number of
rows.
"""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from batchinfer.kernels.common import triton_targets
from batchinfer.kernels.quantized_linear import gpu_tiles
from batchinfer.kernels.quantized_linear.gpu_dequantize import byte, dequantize, parameters_of, scaled, small
from batchinfer.kernels.quantized_linear.gpu_fp8 import fp8_linear
from batchinfer.kernels.quantized_linear.gpu_int8 import quantize_weight, quantized_linear
from batchinfer.kernels.quantized_linear.gpu_tiles import BLOCK_N, tiles
from batchinfer.kernels.quantized_linear.gpu_weight import GpuWeight, pack_weight

__all__ = ["LIBRARY_ROWS", "fp8_linear", "pack_weight", "packed_linear", "quantize_weight", "quantized_linear"]

# Predicted, not measured: with the weight written out, 2.5 bytes a number are moved beyond the product itself. With the
# library at 80% of the matrix rate P and the fused kernel at a share f of it, that is won back above so many rows:
# 2.5 P / (2 B) / (1 / f - 1.25), B the bandwidth; f = 0.5, P and B of datasheets: A100, RTX 4090, H200, B200, MI300X.
LIBRARY_ROWS = {"ampere": 260, "small": 270, "hopper": 350, "blackwell": 470, "cdna3": 410}
_TILES = {
    "ampere": tiles(128, 4, 8, 3) | {64: (8, 2)},
    "small": tiles(128, 4, 8, 2) | {64: (8, 2)},
    "hopper": tiles(128, 4, 8, 4),
    "blackwell": tiles(128, 4, 8, 4) | {32: (8, 4)},
    "cdna3": tiles(128, 4, 8, 1),
}
# By generation and rows of a tile: with fewer some version of Triton spills.
_REGISTERS = {("ampere", 32): 144, ("ampere", 64): 144, ("small", 32): 208, ("small", 64): 144}
_FLOAT32_TILES = dict.fromkeys(_TILES, tiles(32, 4, 4, 1))


@triton.jit(do_not_specialize=["num_rows", "num_groups", "x_stride"], do_not_specialize_on_alignment=["x_stride"])
def _packed_linear(
    x_ptr,  # [num_rows, num_inputs], rows x_stride * ROW_UNIT apart
    values_ptr,  # uint8, as GpuWeight's, like the following
    scales_ptr,
    zeros_ptr,
    offsets_ptr,
    bias_ptr,  # float32 [num_outputs] or None
    out_ptr,  # [parts of the inputs, num_rows, num_outputs], contiguous
    num_rows,
    x_stride,
    num_outputs,
    num_inputs,
    num_groups,
    KIND: tl.constexpr,  # int4, uint8 or e4m3
    NATIVE: tl.constexpr,  # the device has e4m3
    RUN: tl.constexpr,
    GROUP_RUNS: tl.constexpr,
    ROW_UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    pairs = tl.cdiv(num_inputs, 2 * RUN)
    share = tl.cdiv(pairs, tl.num_programs(2))
    row_bytes = pairs * (RUN if KIND == "int4" else 2 * RUN)
    x_row = x_ptr + (m.to(tl.int64) * x_stride * ROW_UNIT)[None, :]
    values = values_ptr + (n.to(tl.int64) * row_bytes)[:, None] + tl.arange(0, RUN)[None, :]
    parameters = (scales_ptr, zeros_ptr, offsets_ptr)
    is_n, is_m = (n < num_outputs)[:, None], (m < num_rows)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = tl.program_id(2) * share
    for pair in range(first, tl.minimum(first + share, pairs)):
        if KIND == "int4":
            packed = tl.load(values + pair * RUN, is_n, 0)
            low, high = small(packed & 15), small(packed >> 4)
        else:
            low = byte(tl.load(values + pair * 2 * RUN, is_n, 0), KIND, NATIVE)
            high = byte(tl.load(values + pair * 2 * RUN + RUN, is_n, 0), KIND, NATIVE)
        for half in tl.static_range(2):
            run = 2 * pair + half
            place = parameters_of(run, n, num_outputs, num_groups, GROUP_RUNS)
            values_of_run = scaled(high if half else low, parameters, place, n < num_outputs)
            k = run * RUN + tl.arange(0, RUN)[:, None]
            x = tl.load(x_row + k, is_m & (k < num_inputs), 0.0)
            total = tl.dot(values_of_run.to(x.dtype), x, total, input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, n < num_outputs, 0.0)[:, None]
    row = tl.program_id(2).to(tl.int64) * num_rows + m
    tl.store(out_ptr + row[None, :] * num_outputs + n[:, None], total.to(out_ptr.dtype.element_ty), is_n & is_m)


def packed_linear(x: torch.Tensor, weight: GpuWeight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """See the package's `packed_linear`."""
    num_rows, n, k = len(x), weight.num_outputs, weight.num_inputs
    if not num_rows:
        return
    if weight.permutation is not None:
        x = x[:, weight.permutation]
    generation = triton_targets.current().generation
    if num_rows >= LIBRARY_ROWS[generation] and out.dtype == x.dtype:
        _library_linear(x, weight, bias, out)
        return
    x, row_unit = gpu_tiles.dense_rows(x)
    split = gpu_tiles.splits(n, num_rows, triton.cdiv(k, 2 * weight.run))
    parts = gpu_tiles.parts_of(split, out)
    block_m, options = gpu_tiles.tile(num_rows, _FLOAT32_TILES if x.dtype == torch.float32 else _TILES)
    if number := _REGISTERS.get((generation, block_m)):
        options |= triton_targets.registers(number)
    _packed_linear[(triton.cdiv(n, BLOCK_N), triton.cdiv(num_rows, block_m), split)](
        *(x, weight.values, weight.scales, weight.zeros, weight.offsets, bias if split == 1 else None, parts),
        *(num_rows, x.stride(0) // row_unit, n, k),
        **{"KIND": weight.kind.name.lower(), "NATIVE": triton_targets.current().has_e4m3, "ROW_UNIT": row_unit},
        **weight.grouping(),
        **{"BLOCK_N": BLOCK_N, "BLOCK_M": block_m},
        **options,
        **triton_targets.FUSED,
    )
    gpu_tiles.join(parts, bias, out)


def _library_linear(x: torch.Tensor, weight: GpuWeight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """x's columns in the order that the weight's are stored in. The allocator gives each call the same scratch."""
    scratch = torch.empty(weight.num_outputs, weight.num_inputs, dtype=x.dtype, device=x.device)
    dequantize(weight, scratch)
    if bias is None:
        torch.mm(x, scratch.T, out=out)
    else:
        torch.addmm(bias.to(x.dtype), x, scratch.T, out=out)
