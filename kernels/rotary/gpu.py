"""Triton backend of rotary."""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from batchinfer.kernels.common.triton_rotate import rotate_token, rotation_sizes
from batchinfer.kernels.common.triton_targets import FUSED


@triton.jit
def _rotary(
    q_ptr,  # [num_tokens, Q_HEADS, HEAD_DIM], strided
    k_ptr,  # [num_tokens, K_HEADS, HEAD_DIM], strided
    positions_ptr,  # int64 [num_tokens]
    cos_sin_ptr,  # float32 [rows, ROTARY_DIM]
    q_out_ptr,  # as q and k, contiguous
    k_out_ptr,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    table = cos_sin_ptr + tl.load(positions_ptr + token) * ROTARY_DIM
    if tl.program_id(1) == 0:
        out = q_out_ptr + token * (Q_HEADS * HEAD_DIM)
        source = q_ptr + token * q_token_stride
        rotate_token(source, q_head_stride, table, out, Q_HEADS, HEAD_DIM, ROTARY_DIM, Q_BLOCK, BLOCK, REST)
    else:
        out = k_out_ptr + token * (K_HEADS * HEAD_DIM)
        source = k_ptr + token * k_token_stride
        rotate_token(source, k_head_stride, table, out, K_HEADS, HEAD_DIM, ROTARY_DIM, K_BLOCK, BLOCK, REST)


def rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `rotary`."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    sizes = {
        "Q_HEADS": q.shape[1],
        "K_HEADS": k.shape[1],
        "Q_BLOCK": triton.next_power_of_2(q.shape[1]),
        "K_BLOCK": triton.next_power_of_2(k.shape[1]),
        **rotation_sizes(q.shape[2], cos_sin_cache.shape[1]),
    }
    num_warps = max(1, min(8, sizes["K_BLOCK"] * sizes["BLOCK"] // 128))
    if len(q):
        _rotary[(len(q), 2)](
            *(q, k, positions, cos_sin_cache.contiguous(), q_out, k_out),
            *(*q.stride()[:2], *k.stride()[:2]),
            **sizes,
            num_warps=num_warps,
            **FUSED,
        )
    return q_out, k_out
