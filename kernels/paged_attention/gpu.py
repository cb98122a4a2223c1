"""Triton backend of paged_attention: one kernel for chunks of prompts and for single new tokens.

A tile holds BLOCK_Q queries of a sequence for all query heads of one KV head, so that keys are read once for the group.
A sequence with one new token has its keys cut into segments, attended in parallel and then joined. Several such
sequences with the same first segments attend to these in one program, as further rows of its products: in the same
order and by the same instructions as alone. Which of the two ways a row takes, and each sum's order, depend on its own
sequence alone. Each sequence must have at least one query.
"""

# Kernels have types of their own.
# mypy: allow-untyped-defs

from typing import Any

import torch
import triton
import triton.language as tl
from batchinfer.kernels.common import triton_targets
from batchinfer.kernels.common.triton_codes import as_bytes, code_of
from batchinfer.kernels.paged_attention.gpu_bias import beside_keys
from batchinfer.kernels.paged_attention.gpu_sizes import Sizes, attention_sizes
from batchinfer.kernels.paged_attention.gpu_tiles import LOG2_E, attend_keys, find_sequence, segment_of
from batchinfer.kernels.paged_attention.segments import SEGMENT_KEYS, SEGMENTS, room, stack_size
from batchinfer.kernels.paged_attention.variant import Variant

Parts = tuple[torch.Tensor, ...]


@triton.jit(do_not_specialize=["num_seqs", "table_stride", "bias_stride", "room"])
def _paged_attention(
    tensors,  # (q [num_tokens, Q_HEADS, HEAD_DIM], out: the same, contiguous)
    caches,  # (k, v) [num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM], bytes where CODE is given
    scales,  # (k, v) float32 [num_blocks, KV_HEADS, BLOCK_SIZE] or None each
    statics,  # (k, v) float32 [KV_HEADS] or [1], or None each
    sinks_ptr,  # float32 [Q_HEADS] or None
    bias_ptr,  # float32 [num_tokens, Q_HEADS, bias_stride], of scores with the keys of each SEGMENT, or None
    bias_stride,
    parts,  # (weighted [num_seqs, Q_HEADS, room, DIM_BLOCK], total and best [num_seqs, Q_HEADS, room])
    room,  # segments that the longest context of the block table has, at most SEGMENTS
    batch,  # (block_table [num_seqs, table_stride], cu_seqlens_q [num_seqs + 1], seq_lens [num_seqs], stacks or None)
    num_seqs,
    table_stride,
    q_strides,  # of tokens and heads
    factors,  # (scale, soft_cap or 1)
    SHAPE: tl.constexpr,  # (KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    GROUP: tl.constexpr,  # query heads of a KV head
    CODE: tl.constexpr,  # of the cache; empty: it is wide
    NATIVE: tl.constexpr,  # the device has e4m3
    VARIANT: tl.constexpr,  # (WINDOW, HAS_CAP, STATIC_STRIDES)
    TILE: tl.constexpr,  # (BLOCK_M, BLOCK_N, DIM_BLOCK)
    SPLIT: tl.constexpr,  # (SEGMENTS, LEAST_KEYS, STACK) for sequences with one new token, None for the others
):
    BLOCK_Q: tl.constexpr = 1 if SPLIT is not None else TILE[0] // GROUP
    kv_head = tl.program_id(0) % SHAPE[0]
    tile = tl.num_programs(0) // SHAPE[0] - 1 - tl.program_id(0) // SHAPE[0]  # later queries have more keys
    sequence = find_sequence(tile, batch[1], num_seqs, BLOCK_Q) if SPLIT is None else tile
    start, q_len, seq_len = _lengths(batch, sequence)
    first_query = (tile - (start // BLOCK_Q + sequence)) * BLOCK_Q if SPLIT is None else 0
    if ((q_len == 1) == (SPLIT is None)) | (first_query >= q_len) | (seq_len < 1):
        return
    m = tl.arange(0, TILE[0])
    query, head = first_query + m // GROUP, kv_head * GROUP + m % GROUP
    is_row, token, owner = (m < BLOCK_Q * GROUP) & (query < q_len), (start + query).to(tl.int64), sequence
    if SPLIT is not None and batch[3] is not None:
        query, owner, is_row, token, is_taken = _stacked(batch, sequence, m // GROUP, SPLIT[2])
        if is_taken:
            return
    row_mask = is_row[:, None] & (tl.arange(0, TILE[2]) < SHAPE[2])[None, :]
    q = _load_queries(tensors[0] + token[:, None] * q_strides[0] + head[:, None] * q_strides[1], row_mask, CODE)
    factor = factors[0] * (1.0 if statics[0] is None else tl.load(statics[0] + kv_head * VARIANT[2][0]))
    first_position = seq_len - q_len + first_query  # keys from its window to the last query's position are seen
    first_key, end, used = _keys_seen(seq_len, first_position, BLOCK_Q, TILE[1], VARIANT[0], SPLIT)
    if SPLIT is not None and first_key >= end:
        return
    row = token * (SHAPE[0] * GROUP) + head
    weighted, total, best, top = attend_keys(
        *(q, seq_len - q_len + query, first_position, first_key, end, seq_len),
        *(batch[0] + sequence.to(tl.int64) * table_stride, caches, scales, kv_head),
        *(factor, (bias_ptr, tl.where(is_row, row, 0) * bias_stride), (1 / factors[1], factors[1]), SHAPE, CODE),
        *(NATIVE, VARIANT[0], VARIANT[1], TILE[1]),
    )
    if SPLIT is not None and used > 1:
        _store_part(parts, owner, SHAPE[0] * GROUP, head, room, weighted * top, total, best, is_row)
    else:
        if sinks_ptr is not None:
            total += tl.exp2(tl.load(sinks_ptr + head, is_row, 0.0) * LOG2_E - best)
        top *= 1.0 if statics[1] is None else tl.load(statics[1] + kv_head * VARIANT[2][1])
        place = tensors[1] + row[:, None] * SHAPE[2] + tl.arange(0, TILE[2])[None, :]
        tl.store(place, (weighted * (top / total)[:, None]).to(tensors[1].dtype.element_ty), row_mask)


@triton.jit
def _lengths(batch, sequence):
    """A sequence's first token, number of queries and length."""
    start = tl.load(batch[1] + sequence)
    return start, tl.load(batch[1] + sequence + 1) - start, tl.load(batch[2] + sequence)


@triton.jit
def _stacked(batch, sequence, place, STACK: tl.constexpr):
    """Each row's place in its sequence's queries, its sequence, whether there is such a row, its token, and whether
    another program has this segment. place: of each row in the stack; a segment that is not shared has the first."""
    stack = batch[3] + sequence.to(tl.int64) * (1 + STACK)
    is_shared, first = tl.program_id(1) < tl.load(stack), tl.load(stack + 1)
    owner = tl.load(stack + 1 + place, place < STACK, -1)
    owner = tl.where(is_shared, owner, tl.where(place == 0, sequence, -1))
    is_row = owner >= 0
    token = tl.load(batch[1] + owner, is_row, 0).to(tl.int64)
    return tl.zeros_like(place), owner, is_row, token, is_shared & (first != sequence)


@triton.jit
def _keys_seen(
    seq_len,
    first_position,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """First key and end of what this program's queries see, or of its segment of that, and the number of segments."""
    first_key = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N if WINDOW > 0 else 0
    end, used = tl.minimum(first_position + BLOCK_Q, seq_len), 1
    if SPLIT is not None:
        keys, used = segment_of(seq_len, first_key, SPLIT[0], SPLIT[1])
        first_key += tl.program_id(1) * keys
        end = tl.minimum(end, first_key + keys)
    return first_key, end, used


@triton.jit
def _store_part(parts, owner, num_heads, head, room, weighted, total, best, mask):
    at = (owner.to(tl.int64) * num_heads + head) * room + tl.program_id(1)
    dim = tl.arange(0, weighted.shape[1])
    tl.store(parts[0] + at[:, None] * weighted.shape[1] + dim[None, :], weighted, mask[:, None])
    tl.store(parts[1] + at, total, mask)
    tl.store(parts[2] + at, best, mask)


@triton.jit
def _load_queries(row_ptr, mask, CODE: tl.constexpr):
    """[BLOCK_M, DIM_BLOCK] in the dtype of the products: float16, which holds codes of 8 bits exactly and weights best,
    where the cache has them and q has 16 bits."""
    q = tl.load(row_ptr + tl.arange(0, mask.shape[1])[None, :], mask, 0.0)
    if CODE != "" and q.dtype != tl.float32:
        q = q.to(tl.float16)
    return q


@triton.jit(do_not_specialize=["room"])
def _join_segments(
    out_ptr,  # [num_tokens, Q_HEADS, HEAD_DIM], contiguous
    parts,  # as _paged_attention's, like the following
    room,
    cu_seqlens_ptr,
    seq_lens_ptr,
    v_static_ptr,
    sinks_ptr,
    SHAPE: tl.constexpr,
    GROUP: tl.constexpr,
    VARIANT: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + sequence)
    if tl.load(cu_seqlens_ptr + sequence + 1) - token != 1:
        return
    first_key = tl.maximum(seq_len - VARIANT[0], 0) // TILE[1] * TILE[1] if VARIANT[0] > 0 else 0
    _, used = segment_of(seq_len, first_key, SPLIT[0], SPLIT[1])
    if used < 2:
        return
    row = token * (SHAPE[0] * GROUP) + head
    segment = tl.arange(0, SPLIT[0])
    is_used = segment < used
    at = (sequence.to(tl.int64) * (SHAPE[0] * GROUP) + head) * room + segment
    dim = tl.arange(0, TILE[2])
    best = tl.load(parts[2] + at, is_used, float("-inf"))
    total = tl.load(parts[1] + at, is_used, 0.0)
    highest = tl.max(best, axis=0)
    decay = tl.where(best == float("-inf"), 0.0, tl.exp2(best - highest))
    whole = tl.sum(total * decay, axis=0)
    if sinks_ptr is not None:
        whole += tl.exp2(tl.load(sinks_ptr + head) * LOG2_E - highest)
    weighted = tl.load(parts[0] + at[:, None] * TILE[2] + dim[None, :], is_used[:, None], 0.0)
    attended = tl.sum(weighted * decay[:, None], axis=0) / whole
    if v_static_ptr is not None:
        attended *= tl.load(v_static_ptr + head // GROUP * VARIANT[2][1])
    place = out_ptr + row * SHAPE[2] + dim
    tl.store(place, attended.to(out_ptr.dtype.element_ty), dim < SHAPE[2])


def _by_kind(
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> tuple[tuple[torch.Tensor | None, ...], tuple[torch.Tensor | None, ...]]:
    """(Scales a token and head, static scales), each of keys and values, None where the cache has none of the kind."""
    both = (k_scale, v_scale)
    per_token = tuple(x if x is not None and x.ndim == 3 else None for x in both)
    return per_token, tuple(x if x is not None and x.ndim == 1 else None for x in both)


def _stride(static: torch.Tensor | None) -> int:
    return 0 if static is None or static.numel() == 1 else 1


def _part_buffers(num_seqs: int, num_q_heads: int, room: int, dim_block: int, device: torch.device) -> Parts:
    rows = (num_seqs, num_q_heads, room)
    return tuple(torch.empty(shape, device=device) for shape in ((*rows, dim_block), rows, rows))


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    variant: Variant,
    stacks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the package's `paged_attention`."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_tokens, num_q_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    num_seqs, group, code = len(seq_lens), num_q_heads // num_kv_heads, code_of(k_cache.dtype)
    if not num_tokens:
        return out
    scales, statics = _by_kind(k_scale, v_scale)
    arguments = {
        "tensors": (q, out),
        "caches": (as_bytes(k_cache), as_bytes(v_cache)),
        "scales": scales,
        "statics": statics,
        **beside_keys(q, variant, block_table.shape[1] * block_size),
        "batch": (block_table, cu_seqlens_q, seq_lens, None),
        "num_seqs": num_seqs,
        "table_stride": block_table.stride(0),
        "q_strides": q.stride()[:2],
        "factors": (float(variant.scale), float(variant.soft_cap or 1.0)),
        "CODE": code,
        "NATIVE": triton_targets.current().has_e4m3,
        **triton_targets.FUSED,
    }
    shape = {
        "SHAPE": (num_kv_heads, block_size, head_dim),
        "GROUP": group,
        "VARIANT": (variant.sliding_window or 0, variant.soft_cap is not None, tuple(_stride(x) for x in statics)),
    }
    dim_block = max(16, triton.next_power_of_2(head_dim))
    sizes = attention_sizes(dim_block, group, q.dtype, bool(code))
    if num_tokens != num_seqs:
        m, n, options = sizes[0]
        tiles = num_tokens // (m // group) + num_seqs
        _paged_attention[(tiles * num_kv_heads,)](
            **arguments, **shape, parts=(None, None, None), room=0, TILE=(m, n, dim_block), SPLIT=None, **options
        )
    arguments["batch"] = (block_table, cu_seqlens_q, seq_lens, stacks if variant.sliding_window is None else None)
    _attend_single_tokens(arguments, shape, dim_block, sizes[1])
    return out


def _attend_single_tokens(arguments: dict[str, Any], shape: dict[str, Any], dim_block: int, sizes: Sizes) -> None:
    """The sequences with one new token. arguments, shape: of _paged_attention. The grids depend on the shapes of
    tensors alone, so that they can be captured; rows without keys leave at once."""
    (q, out), (table, cu_seqlens_q, seq_lens, _) = arguments["tensors"], arguments["batch"]
    num_seqs, num_q_heads, (num_kv_heads, block_size, _) = len(seq_lens), q.shape[1], shape["SHAPE"]
    m, n, options = sizes
    split = {"TILE": (m, n, dim_block), "SPLIT": (SEGMENTS, SEGMENT_KEYS, stack_size(shape["GROUP"]))}
    most = room(table.shape[1] * block_size)
    parts = _part_buffers(num_seqs, num_q_heads, most, dim_block, q.device)
    options = {**options, **triton_targets.registers(255)}
    _paged_attention[(num_seqs * num_kv_heads, most)](**arguments, **shape, parts=parts, room=most, **split, **options)
    _join_segments[(num_seqs, num_q_heads)](
        *(out, parts, most, cu_seqlens_q, seq_lens, arguments["statics"][1], arguments["sinks_ptr"]),
        **shape,
        **split,
        num_warps=4,
        **triton_targets.FUSED,
    )
