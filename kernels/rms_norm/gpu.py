"""Triton backend of rms_norm and add_rms_norm."""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from batchinfer.kernels.common.triton_targets import FUSED

_TILE = 4096  # values that a program holds at most, unless one row has more


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr,  # [num_rows / inner, inner, N], two strides
    weight_ptr,  # [N]
    out_ptr,  # [num_rows, N], contiguous
    num_rows,
    inner,
    outer_stride,
    inner_stride,
    eps,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < N)
    place = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    x = tl.load(x_ptr + place + column, mask, 0.0).to(tl.float32)
    _write_normed(x, weight_ptr, out_ptr, row, column, mask, eps, N)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm(
    x_ptr,  # this and the following tensors: [num_rows, N], contiguous
    residual_ptr,
    weight_ptr,  # [N]
    out_ptr,
    total_ptr,
    num_rows,
    eps,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < N)
    place = row.to(tl.int64) * N + column
    total = tl.load(residual_ptr + place, mask, 0.0).to(tl.float32) + tl.load(x_ptr + place, mask, 0.0).to(tl.float32)
    total = total.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + place, total, mask)
    _write_normed(total.to(tl.float32), weight_ptr, out_ptr, row, column, mask, eps, N)


@triton.jit
def _write_normed(x, weight_ptr, out_ptr, row, column, mask, eps, N: tl.constexpr):
    """x: float32 [ROWS, BLOCK], zeros beyond N. The quotient is rounded before the weight is applied."""
    dtype = out_ptr.dtype.element_ty
    mean = tl.sum(x * x, axis=1, keep_dims=True) / N
    normed = (x * tl.rsqrt(mean + eps)).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, column < N, 0.0).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * N + column, (normed * weight).to(dtype), mask)


def _sizes(n: int) -> dict[str, int]:
    block = triton.next_power_of_2(n)
    rows = max(1, min(16, _TILE // block)) if n <= 512 else 1  # a head's values are few: several rows a program
    return {"N": n, "ROWS": rows, "BLOCK": block, "num_warps": max(1, min(16, rows * block // 512))}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See the package's `rms_norm`."""
    n = x.shape[-1]
    rows = x if x.ndim == 3 and x.stride(-1) == 1 else x.reshape(-1, 1, n).contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes, num_rows = _sizes(n), rows.shape[0] * rows.shape[1]
    if num_rows:
        _rms_norm[(triton.cdiv(num_rows, sizes["ROWS"]),)](
            *(rows, weight.contiguous(), out, num_rows, rows.shape[1], rows.stride(0), rows.stride(1), eps),
            **sizes,
            **FUSED,
        )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `add_rms_norm`."""
    n = x.shape[-1]
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    sizes, num_rows = _sizes(n), x.numel() // n
    if num_rows:
        _add_rms_norm[(triton.cdiv(num_rows, sizes["ROWS"]),)](
            *(x.contiguous(), residual.contiguous(), weight.contiguous(), out, total, num_rows, eps), **sizes, **FUSED
        )
    return out, total
