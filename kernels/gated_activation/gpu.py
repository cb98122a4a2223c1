"""Triton backend of gated_activation."""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from batchinfer.kernels.common.triton_targets import FUSED

_BLOCK = 2048


@triton.jit
def _gated_activation(
    gate_up_ptr,  # [num_rows, 2 N], contiguous
    out_ptr,  # [num_rows, N], contiguous
    N: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    gate = tl.load(gate_up_ptr + row * (2 * N) + column, mask, 0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * N) + N + column, mask, 0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if KIND == "silu":
        active = gate / (1 + tl.exp(-gate))
    elif KIND == "gelu":
        active = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * (1 - 1 / (tl.exp(2 * inner) + 1))  # (1 + tanh(y)) / 2 = 1 - 1 / (exp(2 y) + 1)
    tl.store(out_ptr + row * N + column, (active.to(dtype).to(tl.float32) * up).to(dtype), mask)


def gated_activation(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """See the package's `gated_activation`."""
    n = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], n), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        block = min(_BLOCK, triton.next_power_of_2(n))
        grid = (out.numel() // n, triton.cdiv(n, block))
        sizes = {"N": n, "KIND": kind, "BLOCK": block, "num_warps": max(1, block // 512)}
        _gated_activation[grid](gate_up.contiguous(), out, **sizes, **FUSED)
    return out
