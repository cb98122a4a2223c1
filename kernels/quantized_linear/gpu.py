"""Triton backend of packed_linear: weights are unpacked to the activations' format in registers, as the left operand of
the products, so that few rows of activations still fill the matrix instructions.

How many parts the inputs are cut into depends on the weight and on whether there are more than SPLIT_ROWS rows.
"""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from batchinfer.kernels.common import triton_targets
from batchinfer.kernels.common.triton_codes import decode
from batchinfer.kernels.quantized_linear.gpu_weight import GpuWeight, pack_weight

__all__ = ["pack_weight", "packed_linear"]

SPLIT_ROWS = 64  # up to here the device is filled by cutting the inputs
_PROGRAMS = 256  # that fill a device
_MOST_SPLITS = 8
_BLOCK_N = 128


@triton.jit(do_not_specialize=["num_rows", "x_stride"], do_not_specialize_on_alignment=["x_stride"])
def _packed_linear(
    x_ptr,  # [num_rows, K], rows x_stride * ROW_UNIT apart
    values_ptr,  # uint8, as GpuWeight's, like the following
    scales_ptr,
    zeros_ptr,
    offsets_ptr,
    bias_ptr,  # float32 [N] or None
    out_ptr,  # [SPLIT, num_rows, N], contiguous
    num_rows,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,  # int4, uint8 or e4m3
    NATIVE: tl.constexpr,  # the device has e4m3
    RUN: tl.constexpr,
    GROUP_RUNS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROW_UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    pairs: tl.constexpr = (K + 2 * RUN - 1) // (2 * RUN)
    share: tl.constexpr = (pairs + SPLIT - 1) // SPLIT
    row_bytes: tl.constexpr = pairs * RUN if KIND == "int4" else pairs * 2 * RUN
    x_row = x_ptr + (m.to(tl.int64) * x_stride * ROW_UNIT)[None, :]
    values = values_ptr + (n.to(tl.int64) * row_bytes)[:, None] + tl.arange(0, RUN)[None, :]
    parameters = (scales_ptr, zeros_ptr, offsets_ptr)
    is_n, is_m = (n < N)[:, None], (m < num_rows)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = tl.program_id(2) * share
    for pair in range(first, tl.minimum(first + share, pairs)):
        if KIND == "int4":
            packed = tl.load(values + pair * RUN, is_n, 0)
            low, high = _small(packed & 15), _small(packed >> 4)
        else:
            low = _byte(tl.load(values + pair * 2 * RUN, is_n, 0), KIND, NATIVE)
            high = _byte(tl.load(values + pair * 2 * RUN + RUN, is_n, 0), KIND, NATIVE)
        total = _add_product(total, low, 2 * pair, parameters, n, x_row, is_m, N, K, RUN, GROUP_RUNS)
        total = _add_product(total, high, 2 * pair + 1, parameters, n, x_row, is_m, N, K, RUN, GROUP_RUNS)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, n < N, 0.0)[:, None]
    row = tl.program_id(2).to(tl.int64) * num_rows + m
    tl.store(out_ptr + row[None, :] * N + n[:, None], total.to(out_ptr.dtype.element_ty), is_n & is_m)


@triton.jit
def _small(values):
    """Whole numbers below 1024 to float32 without the slow conversion: they are the last bits of 1024 + value."""
    return (values.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True).to(tl.float32) - 1024.0


@triton.jit
def _byte(values, KIND: tl.constexpr, NATIVE: tl.constexpr):
    return decode(values, "e4m3", NATIVE).to(tl.float32) if KIND == "e4m3" else _small(values)


@triton.jit
def _add_product(
    total,  # float32 [BLOCK_N, BLOCK_M]
    values,  # float32 [BLOCK_N, RUN], the weight's numbers in run `run`
    run,
    parameters,  # (scales, zeros, offsets)
    n,
    x_row,
    is_m,
    N: tl.constexpr,
    K: tl.constexpr,
    RUN: tl.constexpr,
    GROUP_RUNS: tl.constexpr,
):
    groups: tl.constexpr = (K + RUN * GROUP_RUNS - 1) // (RUN * GROUP_RUNS)
    group = tl.minimum(run // GROUP_RUNS, groups - 1) * N + n  # a run of filling belongs to none
    if parameters[1] is not None:
        values -= tl.load(parameters[1] + group, n < N, 0.0)[:, None]
    values *= tl.load(parameters[0] + group, n < N, 0.0)[:, None]
    if parameters[2] is not None:
        values += tl.load(parameters[2] + group, n < N, 0.0)[:, None]
    k = run * RUN + tl.arange(0, RUN)[:, None]
    x = tl.load(x_row + k, is_m & (k < K), 0.0)
    return tl.dot(values.to(x.dtype), x, total, input_precision="ieee")


def packed_linear(x: torch.Tensor, weight: GpuWeight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """See the package's `packed_linear`."""
    num_rows, n, k = len(x), weight.num_outputs, weight.num_inputs
    if not num_rows:
        return
    if weight.permutation is not None:
        x = x[:, weight.permutation]
    x = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 else x.contiguous()
    row_unit = 8 if x.stride(0) % 8 == 0 else 1
    split = _splits(weight, num_rows)
    parts = out if split == 1 else torch.empty((split, num_rows, n), device=x.device)
    block_m, options = _sizes(num_rows, x.dtype)
    _packed_linear[(triton.cdiv(n, _BLOCK_N), triton.cdiv(num_rows, block_m), split)](
        *(x, weight.values, weight.scales, weight.zeros, weight.offsets, bias if split == 1 else None, parts),
        *(num_rows, x.stride(0) // row_unit),
        **{"N": n, "K": k, "KIND": weight.kind.name.lower(), "NATIVE": triton_targets.current().has_e4m3},
        **{"RUN": weight.run, "GROUP_RUNS": weight.group_runs, "SPLIT": split, "ROW_UNIT": row_unit},
        **{"BLOCK_N": _BLOCK_N, "BLOCK_M": block_m},
        **options,
        **triton_targets.FUSED,
    )
    if split > 1:
        total = parts.sum(0)
        out.copy_(total if bias is None else total + bias)


def _splits(weight: GpuWeight, num_rows: int) -> int:
    if num_rows > SPLIT_ROWS:
        return 1
    tiles = triton.cdiv(weight.num_outputs, _BLOCK_N)
    pairs = triton.cdiv(weight.num_inputs, 2 * weight.run)
    split = 1
    while split < _MOST_SPLITS and tiles * split < _PROGRAMS // 2 and pairs >= 8 * split:
        split *= 2
    return split


def _sizes(num_rows: int, dtype: torch.dtype) -> tuple[int, dict[str, int]]:
    """Rows of a tile, and options of the launch."""
    block_m = max(16, min(128, triton.next_power_of_2(num_rows)))
    generation = triton_targets.current().generation
    if dtype == torch.float32:
        return min(block_m, 32), {"num_warps": 4, "num_stages": 1}
    stages = {"ampere": 3, "small": 2, "hopper": 4, "blackwell": 4, "cdna3": 1}[generation]
    return block_m, {"num_warps": 8 if block_m == 128 else 4, "num_stages": stages}
