"""Triton backend of kv_store and rotary_kv_store: a program for each token and tensor."""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from batchinfer.kernels.common.key_offset import SEGMENT as _SEGMENT
from batchinfer.kernels.common.triton_codes import as_bytes, code_of, largest_code
from batchinfer.kernels.common.triton_rotate import rotate_token, rotation_sizes
from batchinfer.kernels.common.triton_targets import FUSED
from batchinfer.kernels.kv_store.gpu_vectors import row_of, store_rotated, store_vectors

SEGMENT: tl.constexpr = tl.constexpr(_SEGMENT)


@triton.jit
def _kv_store(
    k_ptr,  # [num_tokens, KV_HEADS, HEAD_DIM], strided, as v
    v_ptr,
    k_cache_ptr,  # [num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM], bytes where CODE is given, as v_cache
    v_cache_ptr,
    slots_ptr,  # int64 [num_tokens]
    k_scale_ptr,  # float32 [num_blocks, KV_HEADS, BLOCK_SIZE], or [KV_HEADS] or [1] where STATIC, or None, as v_scale
    v_scale_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CODE: tl.constexpr,
    LARGEST: tl.constexpr,
    STATIC: tl.constexpr,  # strides of static scales of keys and values; -1: not static
    KV_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        row = row_of(slot, KV_HEADS, BLOCK_SIZE, KV_BLOCK)
        if tl.program_id(1) == 0:
            x = k_ptr + token * k_token_stride
            store_vectors(
                x, k_head_stride, k_cache_ptr, k_scale_ptr, row, KV_HEADS, HEAD_DIM, CODE, LARGEST, STATIC[0], DIM_BLOCK
            )
        else:
            x = v_ptr + token * v_token_stride
            store_vectors(
                x, v_head_stride, v_cache_ptr, v_scale_ptr, row, KV_HEADS, HEAD_DIM, CODE, LARGEST, STATIC[1], DIM_BLOCK
            )


@triton.jit
def _rotary_kv_store(
    tensors,  # (q, k, v) [num_tokens, Q_HEADS or KV_HEADS, HEAD_DIM], strided
    q_out_ptr,  # [num_tokens, Q_HEADS, HEAD_DIM], contiguous
    positions_ptr,  # int64 [num_tokens]
    cos_sin_ptr,  # float32 [rows, ROTARY_DIM]
    caches,  # (k, v) as _kv_store's, like the following two
    slots_ptr,
    scales,  # (k, v)
    known,  # of keys: (offset, weight) float32 [segments, KV_HEADS, HEAD_DIM], or None each
    token_positions_ptr,  # int64 [num_tokens], or None where both are
    token_strides,  # of q, k and v
    head_strides,
    QUERIES: tl.constexpr,  # (Q_HEADS, Q_BLOCK)
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CODE: tl.constexpr,
    LARGEST: tl.constexpr,
    STATIC: tl.constexpr,  # strides of static scales of keys and values; -1: not static
    KV_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROTATION: tl.constexpr,  # (HEAD_DIM, ROTARY_DIM, BLOCK, REST)
):
    HEAD_DIM: tl.constexpr = ROTATION[0]
    token = tl.program_id(0).to(tl.int64)
    table = cos_sin_ptr + tl.load(positions_ptr + token) * ROTATION[1]
    if tl.program_id(1) == 0:
        source = tensors[0] + token * token_strides[0]
        out = q_out_ptr + token * (QUERIES[0] * HEAD_DIM)
        rotate_token(
            *(source, head_strides[0], table, out, QUERIES[0]),
            *(HEAD_DIM, ROTATION[1], QUERIES[1], ROTATION[2], ROTATION[3]),
        )
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            row = row_of(slot, KV_HEADS, BLOCK_SIZE, KV_BLOCK)
            if tl.program_id(1) == 1:
                x = tensors[1] + token * token_strides[1]
                segment = 0 if token_positions_ptr is None else tl.load(token_positions_ptr + token) // SEGMENT
                store_rotated(
                    *(x, head_strides[1], table, known[0], known[1], segment, caches[0], scales[0], row),
                    *(KV_HEADS, HEAD_DIM, ROTATION[1], CODE, LARGEST, STATIC[0], KV_BLOCK, ROTATION[2], ROTATION[3]),
                )
            else:
                x, stride = tensors[2] + token * token_strides[2], head_strides[2]
                store_vectors(
                    x, stride, caches[1], scales[1], row, KV_HEADS, HEAD_DIM, CODE, LARGEST, STATIC[1], DIM_BLOCK
                )


def _sizes(
    k_cache: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> dict[str, int | float | str | tuple[int, ...]]:
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    kv_block, dim_block = triton.next_power_of_2(num_kv_heads), triton.next_power_of_2(head_dim)
    return {
        "KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "CODE": code_of(k_cache.dtype),
        "LARGEST": largest_code(k_cache.dtype),
        "STATIC": tuple(_static_stride(scale) for scale in (k_scale, v_scale)),
        "KV_BLOCK": kv_block,
        "DIM_BLOCK": dim_block,
        "num_warps": max(1, min(8, kv_block * dim_block // 256)),  # 8 values a thread: loads of 16 bytes
    }


def _static_stride(scale: torch.Tensor | None) -> int:
    return -1 if scale is None or scale.ndim != 1 else int(scale.numel() > 1)


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def kv_store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """See the package's `kv_store`."""
    k, v = _dense_heads(k), _dense_heads(v)
    if len(k):
        _kv_store[(len(k), 2)](
            *(k, v, as_bytes(k_cache), as_bytes(v_cache), slot_mapping, k_scale, v_scale),
            *(*k.stride()[:2], *v.stride()[:2]),
            **_sizes(k_cache, k_scale, v_scale),
            HEAD_DIM=k_cache.shape[3],
            **FUSED,
        )


def rotary_kv_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_offset: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    token_positions: torch.Tensor | None,
) -> torch.Tensor:
    """See the package's `rotary_kv_store`."""
    q, k, v = (_dense_heads(x) for x in (q, k, v))
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if len(q):
        rotation = rotation_sizes(q.shape[2], cos_sin_cache.shape[1])
        _rotary_kv_store[(len(q), 3)](
            *((q, k, v), q_out, positions, cos_sin_cache.contiguous()),
            *((as_bytes(k_cache), as_bytes(v_cache)), slot_mapping, (k_scale, v_scale), (k_offset, k_weight)),
            None if k_offset is None and k_weight is None else token_positions,
            *(tuple(x.stride(axis) for x in (q, k, v)) for axis in (0, 1)),
            QUERIES=(q.shape[1], triton.next_power_of_2(q.shape[1])),
            **_sizes(k_cache, k_scale, v_scale),
            ROTATION=tuple(rotation[name] for name in ("HEAD_DIM", "ROTARY_DIM", "BLOCK", "REST")),
            **FUSED,
        )
    return q_out
