"""What the part of the keys that the cache does not hold adds to the scores, in Triton: one number a query and segment
of positions, because the keys of a segment all lack the same. Called by gpu.py."""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from batchinfer.kernels.common import triton_targets
from batchinfer.kernels.common.key_offset import SEGMENT
from batchinfer.kernels.paged_attention.gpu_tiles import LOG2_E
from batchinfer.kernels.paged_attention.variant import Variant


@triton.jit(do_not_specialize=["num_segments"])
def _score_bias(
    q_ptr,  # [num_tokens, Q_HEADS, HEAD_DIM]
    offset_ptr,  # float32 [num_segments or more, KV_HEADS, HEAD_DIM]
    out_ptr,  # float32 [num_tokens, Q_HEADS, num_segments]
    num_segments,
    token_stride,
    head_stride,
    factor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    row = tl.arange(0, GROUP_BLOCK)
    dim = tl.arange(0, DIM_BLOCK)
    head = kv_head * GROUP + row
    place = token * token_stride + head[:, None] * head_stride + dim[None, :]
    q = tl.load(q_ptr + place, (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :], 0.0).to(tl.float32) * factor
    offset_ptr += kv_head * HEAD_DIM + dim
    first = tl.load(offset_ptr, dim < HEAD_DIM, 0.0)
    out = out_ptr + (token * (KV_HEADS * GROUP) + head) * num_segments
    for segment in range(num_segments):
        offset = tl.load(offset_ptr + segment * (KV_HEADS * HEAD_DIM), dim < HEAD_DIM, 0.0) - first
        tl.store(out + segment, tl.sum(q * offset[None, :], axis=1), row < GROUP)


def beside_keys(q: torch.Tensor, variant: Variant, num_positions: int) -> dict[str, torch.Tensor | int | None]:
    """The arguments of _paged_attention that join the scores of stored keys, which lie at num_positions at most."""
    bias = _bias(q, variant, num_positions)
    return {"sinks_ptr": variant.sinks, "bias_ptr": bias, "bias_stride": 0 if bias is None else bias.shape[2]}


def _bias(q: torch.Tensor, variant: Variant, num_positions: int) -> torch.Tensor | None:
    """float32 [num_tokens, num_q_heads, num_segments], added to scores in powers of two: the products of queries and
    offsets, less that of segment 0, which softmax does not see. So a row of few keys has the same bits beside long ones
    and where no segment but that is in the batch, for which None is returned."""
    num_segments = -(-num_positions // SEGMENT)
    if variant.k_offset is None or num_segments < 2:
        return None
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = variant.k_offset.shape[1]
    group = num_q_heads // num_kv_heads
    dim_block = triton.next_power_of_2(head_dim)
    lanes = triton_targets.current().warp_size
    out = torch.empty(num_tokens, num_q_heads, num_segments, device=q.device)
    _score_bias[(num_tokens, num_kv_heads)](
        *(q, variant.k_offset, out, num_segments, *q.stride()[:2], float(variant.scale) * LOG2_E.value),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        GROUP_BLOCK=max(triton.next_power_of_2(group), 8 * lanes // dim_block),  # each lane loads 8 numbers at once
        DIM_BLOCK=dim_block,
        num_warps=1,
        **triton_targets.FUSED,
    )
    return out
