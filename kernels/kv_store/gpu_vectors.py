"""How the Triton kernels of gpu.py scale, encode and place the vectors of a token's heads."""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from batchinfer.kernels.common.triton_codes import encode, rounding_error
from batchinfer.kernels.common.triton_rotate import load_rest, load_rotated
from batchinfer.kernels.kv_store.reference import SCALE_STEPS

_SCALE_STEPS: tl.constexpr = tl.constexpr(SCALE_STEPS)
_LEAST_SCALE: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def row_of(slot, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_BLOCK: tl.constexpr):
    """int64 [KV_BLOCK, 1]: place of each head's vector in the cache seen as [-1, HEAD_DIM]."""
    head = tl.arange(0, KV_BLOCK)[:, None]
    return (slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE


@triton.jit
def store_vectors(
    x_ptr,
    head_stride,
    cache_ptr,
    scale_ptr,
    row,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODE: tl.constexpr,
    LARGEST: tl.constexpr,
    STATIC: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    x = load_rest(x_ptr, head_stride, KV_HEADS, 0, HEAD_DIM, row.shape[0], DIM_BLOCK)
    scale = _scale(_largest(x), x, x, x, 1, scale_ptr, row, KV_HEADS, CODE, LARGEST, STATIC)
    _write(x, scale, cache_ptr, row, 0, HEAD_DIM, KV_HEADS, HEAD_DIM, CODE, LARGEST)


@triton.jit
def store_rotated(
    x_ptr,
    head_stride,
    table,
    offset_ptr,  # float32 [segments, KV_HEADS, HEAD_DIM]: row `segment` is taken off the rotated values; or None
    segment,
    cache_ptr,
    scale_ptr,
    row,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    CODE: tl.constexpr,
    LARGEST: tl.constexpr,
    STATIC: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    half: tl.constexpr = ROTARY_DIM // 2
    first, second = load_rotated(x_ptr, head_stride, table, KV_HEADS, ROTARY_DIM, KV_BLOCK, BLOCK)
    if offset_ptr is not None:
        offset_ptr += segment * (KV_HEADS * HEAD_DIM)
        first = first.to(tl.float32) - load_rest(offset_ptr, HEAD_DIM, KV_HEADS, 0, half, KV_BLOCK, BLOCK)
        second = second.to(tl.float32) - load_rest(offset_ptr, HEAD_DIM, KV_HEADS, half, ROTARY_DIM, KV_BLOCK, BLOCK)
    most = _larger(_largest(first), _largest(second))
    if REST > 0:
        rest = load_rest(x_ptr, head_stride, KV_HEADS, ROTARY_DIM, HEAD_DIM, KV_BLOCK, REST)
        if offset_ptr is not None:
            offset = load_rest(offset_ptr, HEAD_DIM, KV_HEADS, ROTARY_DIM, HEAD_DIM, KV_BLOCK, REST)
            rest = rest.to(tl.float32) - offset
        most = _larger(most, _largest(rest))
        scale = _scale(most, first, second, rest, 3, scale_ptr, row, KV_HEADS, CODE, LARGEST, STATIC)
        _write(rest, scale, cache_ptr, row, ROTARY_DIM, HEAD_DIM, KV_HEADS, HEAD_DIM, CODE, LARGEST)
    else:
        scale = _scale(most, first, second, first, 2, scale_ptr, row, KV_HEADS, CODE, LARGEST, STATIC)
    _write(first, scale, cache_ptr, row, 0, half, KV_HEADS, HEAD_DIM, CODE, LARGEST)
    _write(second, scale, cache_ptr, row, half, ROTARY_DIM, KV_HEADS, HEAD_DIM, CODE, LARGEST)


@triton.jit
def _largest(x):
    """float32 [heads, 1]: largest magnitude, NaN where there is one."""
    magnitude = tl.abs(x.to(tl.float32))
    has_nan = tl.max((magnitude != magnitude).to(tl.int32), axis=1, keep_dims=True)
    return tl.where(has_nan > 0, float("nan"), tl.max(magnitude, axis=1, keep_dims=True))


@triton.jit
def _larger(a, b):
    return tl.where(a != a, a, tl.where(b != b, b, tl.maximum(a, b)))


@triton.jit
def _scale(
    most,  # float32 [heads, 1], largest magnitude of each head
    a,  # [heads, values]: the PIECES first of these three are a head's values
    b,
    c,
    PIECES: tl.constexpr,
    scale_ptr,
    row,
    KV_HEADS: tl.constexpr,
    CODE: tl.constexpr,
    LARGEST: tl.constexpr,
    STATIC: tl.constexpr,
):
    """The scale of each head's vector: 1 where the cache has none, the static one, or the one that the reference
    chooses, which is written too."""
    head = tl.arange(0, row.shape[0])[:, None]
    if scale_ptr is None:
        best = tl.full(row.shape, 1.0, tl.float32)
    elif STATIC >= 0:
        best = tl.load(scale_ptr + head * STATIC, head < KV_HEADS, 1.0)
    else:
        least = tl.math.div_rn(most, tl.full(row.shape, LARGEST, tl.float32))
        least = tl.where(least < _LEAST_SCALE, _LEAST_SCALE, least)  # NaN stays
        best = least
        if CODE != "int8":
            best_error = tl.full(row.shape, float("inf"), tl.float32)
            for i in tl.static_range(8):
                inverse = tl.math.div_rn(tl.full(row.shape, 1.0, tl.float32), least * _SCALE_STEPS[i])
                error = rounding_error(a, inverse, CODE)
                if PIECES > 1:
                    error += rounding_error(b, inverse, CODE)
                if PIECES > 2:
                    error += rounding_error(c, inverse, CODE)
                error *= _SCALE_STEPS[i] * _SCALE_STEPS[i]
                best = tl.where(error < best_error, least * _SCALE_STEPS[i], best)
                best_error = tl.where(error < best_error, error, best_error)
        tl.store(scale_ptr + row, best, head < KV_HEADS)
    return best


@triton.jit
def _write(
    x,
    scale,
    cache_ptr,
    row,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Dimensions FIRST to END of each head."""
    place = FIRST + tl.arange(0, x.shape[1])[None, :]
    at = cache_ptr + row * HEAD_DIM + place
    mask = (tl.arange(0, x.shape[0])[:, None] < KV_HEADS) & (place < END)
    if CODE == "":
        tl.store(at, x.to(cache_ptr.dtype.element_ty), mask)
    else:
        wide = x.to(tl.float32)
        tl.store(at, encode(tl.math.div_rn(wide, tl.broadcast_to(scale, wide.shape)), CODE, LARGEST), mask)
