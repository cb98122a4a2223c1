"""One tile of queries against runs of tiles of keys in Triton: what the kernels of gpu.py share."""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import triton
import triton.language as tl
from batchinfer.kernels.common.key_offset import SEGMENT as _SEGMENT
from batchinfer.kernels.common.triton_codes import decode

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
SEGMENT: tl.constexpr = tl.constexpr(_SEGMENT)  # a multiple of each BLOCK_N


@triton.jit
def find_sequence(tile, cu_seqlens_ptr, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence whose tiles hold number `tile`, where sequence s has room for tiles from cu_seqlens[s] // BLOCK_Q +
    s on: that bounds their number without reading the lengths on the host."""
    low = tl.full((), 0, tl.int32)
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_ptr + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def attend_keys(
    q,  # [M, D]
    position,  # int32 [M], of each row's query
    first_position,  # the least of them
    first,  # keys first to end, tile by tile; first is a multiple of BLOCK_N
    end,
    seq_len,
    table_ptr,  # of the sequence
    caches,  # (k, v)
    scales,  # (k, v): float32 pointers or None
    kv_head,
    factor,  # of the scores
    bias,  # (float32 pointer or None, int64 [M] of each row): what scores with keys of segment 0, 1, ... get, in log2
    caps,  # (1 / soft_cap, soft_cap)
    SHAPE: tl.constexpr,  # (KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    CODE: tl.constexpr,
    NATIVE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    HAS_CAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(weighted float32 [M, D], total [M], best [M], top): the values' sum under the softmax's weights, in units of
    `top`, the sum of the weights and the highest score in powers of two.

    `top` is a power of two at least as large as the scales of the values: so the products of weights and scales fit a
    float16. Source of the online softmax: Milakov and Gimelshein, arXiv 1805.02867.
    """
    weighted = tl.zeros((q.shape[0], q.shape[1]), tl.float32)
    total = tl.zeros((q.shape[0],), tl.float32)
    best = tl.full((q.shape[0],), float("-inf"), tl.float32)
    top = tl.full((), 1.0 if scales[1] is None else 7.888609052210118e-31, tl.float32)  # 2^-100
    state = (weighted, total, best, top)
    middle = first
    if WINDOW == 0:  # the keys up to here are seen by every row
        middle = tl.maximum(tl.minimum(first_position + 1, end) // BLOCK_N * BLOCK_N, first)
        state = _attend_tiles(
            *(state, q, position, first, middle, seq_len, table_ptr, caches, scales, kv_head, factor, bias, caps),
            *(SHAPE, CODE, NATIVE, WINDOW, HAS_CAP, BLOCK_N, False),
        )
    return _attend_tiles(
        *(state, q, position, middle, end, seq_len, table_ptr, caches, scales, kv_head, factor, bias, caps),
        *(SHAPE, CODE, NATIVE, WINDOW, HAS_CAP, BLOCK_N, True),
    )


@triton.jit
def _attend_tiles(
    state,
    q,
    position,
    first,
    end,
    seq_len,
    table_ptr,
    caches,
    scales,
    kv_head,
    factor,
    bias,
    caps,
    SHAPE: tl.constexpr,
    CODE: tl.constexpr,
    NATIVE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The state after keys first to end. MASKED: not every row sees all of them."""
    weighted, total, best, top = state
    dim = tl.arange(0, q.shape[1])
    in_head = (dim < SHAPE[2])[None, :]
    for start in range(first, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        written = key < seq_len
        block = tl.load(table_ptr + key // SHAPE[1], written, 0).to(tl.int64)
        row = (block * SHAPE[0] + kv_head) * SHAPE[1] + key % SHAPE[1]
        mask = written[:, None] & in_head if MASKED else in_head
        place = row[:, None] * SHAPE[2] + dim[None, :]
        k = _load(caches[0] + place, mask, q.dtype, CODE, NATIVE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
        scores = _in_log2(scores, scales[0], row, written, bias, start // SEGMENT, caps, HAS_CAP)
        if MASKED:
            visible = written[None, :] & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)  # nothing seen yet
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(best - base)
        total = total * decay + tl.sum(weights, axis=1)
        if scales[1] is not None:
            v_scale = tl.load(scales[1] + row, written, 0.0)
            new_top = tl.maximum(top, _power_of_two_above(tl.max(v_scale, axis=0)))
            weights *= (v_scale / new_top)[None, :]
            decay *= top / new_top
            top = new_top
        v = _load(caches[1] + place, mask, q.dtype, CODE, NATIVE)
        weighted = tl.dot(weights.to(q.dtype), v, weighted * decay[:, None], input_precision="ieee")
        best = new_best
    return weighted, total, best, top


@triton.jit
def _in_log2(scores, scale_ptr, row, written, bias, segment, caps, HAS_CAP: tl.constexpr):
    """Scores as powers of two, with the keys' scales, the cap and what a segment's keys lack."""
    if scale_ptr is not None:
        scores *= tl.load(scale_ptr + row, written, 0.0)[None, :]
    if HAS_CAP:
        scores = caps[1] * (1 - 2 / (tl.exp(scores * (2 * caps[0])) + 1))
    scores *= LOG2_E
    if bias[0] is not None:
        scores += tl.load(bias[0] + bias[1] + segment)[:, None]
    return scores


@triton.jit
def _load(at, mask, dtype: tl.constexpr, CODE: tl.constexpr, NATIVE: tl.constexpr):
    values = tl.load(at, mask, 0.0) if CODE == "" else decode(tl.load(at, mask, 0), CODE, NATIVE)
    return values.to(dtype)


@triton.jit
def _power_of_two_above(x):
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def segment_of(seq_len, first_key, SEGMENTS: tl.constexpr, LEAST_KEYS: tl.constexpr):
    """(keys a segment, number of segments) of a row's keys: by its own length alone, so that a row's sums run in the
    same order whatever stands beside it. As segments.segment_keys."""
    wide = tl.maximum((seq_len - first_key + SEGMENTS * LEAST_KEYS - 1) // (SEGMENTS * LEAST_KEYS), 1)
    return wide * LEAST_KEYS, (seq_len - first_key + wide * LEAST_KEYS - 1) // (wide * LEAST_KEYS)
