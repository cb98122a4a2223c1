"""Triton backend of layer_norm and add_layer_norm."""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from batchinfer.kernels.common.triton_targets import FUSED


@triton.jit
def _layer_norm(
    x_ptr,  # this and the following tensors: [num_rows, N], contiguous
    residual_ptr,  # or None: x is normalised alone
    weight_ptr,  # [N]
    bias_ptr,  # [N] or None
    out_ptr,
    total_ptr,  # x + residual, where that is given
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    mask = column < N
    place = tl.program_id(0).to(tl.int64) * N + column
    x = tl.load(x_ptr + place, mask, 0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if residual_ptr is not None:
        total = (tl.load(residual_ptr + place, mask, 0.0).to(tl.float32) + x).to(dtype)
        tl.store(total_ptr + place, total, mask)
        x = total.to(tl.float32)
    centred = tl.where(mask, x - tl.sum(x, axis=0) / N, 0.0)
    scaled = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / N + eps)
    scaled *= tl.load(weight_ptr + column, mask, 0.0).to(tl.float32)
    if bias_ptr is not None:
        scaled += tl.load(bias_ptr + column, mask, 0.0).to(tl.float32)
    tl.store(out_ptr + place, scaled.to(dtype), mask)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See the package's `layer_norm`."""
    return _run(x, None, weight, bias, eps)[0]


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `add_layer_norm`."""
    return _run(x, residual, weight, bias, eps)


def _run(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    n = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        block = triton.next_power_of_2(n)
        _layer_norm[(x.numel() // n,)](
            *(x.contiguous(), None if residual is None else residual.contiguous()),
            *(weight.contiguous(), None if bias is None else bias.contiguous(), out, total, eps),
            **{"N": n, "BLOCK": block, "num_warps": max(1, min(16, block // 512))},
            **FUSED,
        )
    return out, total
