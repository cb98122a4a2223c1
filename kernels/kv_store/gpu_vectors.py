"""How the Triton kernels of gpu.py scale, encode and place the vectors of a token's heads."""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from batchinfer.kernels.common.triton_codes import coded, encode, rounding_error
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
    scale = _scale(_largest(x), x, x, x, 1.0, 1.0, 1.0, 1, scale_ptr, row, KV_HEADS, CODE, LARGEST, STATIC)
    _write(x, scale, cache_ptr, row, 0, HEAD_DIM, KV_HEADS, HEAD_DIM, CODE, LARGEST)


@triton.jit
def store_rotated(
    x_ptr,
    head_stride,
    table,
    offset_ptr,  # float32 [segments, KV_HEADS, HEAD_DIM]: row `segment` is taken off the rotated values; or None
    weight_ptr,  # the same: what a squared error counts
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
    first = first.to(tl.float32) - _known(offset_ptr, segment, 0.0, 0, half, KV_HEADS, HEAD_DIM, KV_BLOCK, BLOCK)
    second = second.to(tl.float32) - _known(
        offset_ptr, segment, 0.0, half, ROTARY_DIM, KV_HEADS, HEAD_DIM, KV_BLOCK, BLOCK
    )
    first_weight = _known(weight_ptr, segment, 1.0, 0, half, KV_HEADS, HEAD_DIM, KV_BLOCK, BLOCK)
    second_weight = _known(weight_ptr, segment, 1.0, half, ROTARY_DIM, KV_HEADS, HEAD_DIM, KV_BLOCK, BLOCK)
    most = _larger(_largest(first), _largest(second))
    if REST > 0:
        rest = load_rest(x_ptr, head_stride, KV_HEADS, ROTARY_DIM, HEAD_DIM, KV_BLOCK, REST).to(tl.float32)
        rest -= _known(offset_ptr, segment, 0.0, ROTARY_DIM, HEAD_DIM, KV_HEADS, HEAD_DIM, KV_BLOCK, REST)
        weight = _known(weight_ptr, segment, 1.0, ROTARY_DIM, HEAD_DIM, KV_HEADS, HEAD_DIM, KV_BLOCK, REST)
        most = _larger(most, _largest(rest))
        parts = (first, second, rest, first_weight, second_weight, weight)
        scale = _scale(most, *parts, 3, scale_ptr, row, KV_HEADS, CODE, LARGEST, STATIC)
        _write(rest, scale, cache_ptr, row, ROTARY_DIM, HEAD_DIM, KV_HEADS, HEAD_DIM, CODE, LARGEST)
    else:
        parts = (first, second, first, first_weight, second_weight, first_weight)
        scale = _scale(most, *parts, 2, scale_ptr, row, KV_HEADS, CODE, LARGEST, STATIC)
    _write(first, scale, cache_ptr, row, 0, half, KV_HEADS, HEAD_DIM, CODE, LARGEST)
    _write(second, scale, cache_ptr, row, half, ROTARY_DIM, KV_HEADS, HEAD_DIM, CODE, LARGEST)


@triton.jit
def _known(
    table_ptr,
    segment,
    DEFAULT: tl.constexpr,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Dimensions FIRST to END of a segment's row of a table; DEFAULT where there is no table."""
    if table_ptr is None:
        values = tl.full((1, 1), DEFAULT, tl.float32)
    else:
        at = table_ptr + segment * (KV_HEADS * HEAD_DIM)
        values = load_rest(at, HEAD_DIM, KV_HEADS, FIRST, END, KV_BLOCK, BLOCK)
    return values


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
    a_weight,  # of their squared errors
    b_weight,
    c_weight,
    PIECES: tl.constexpr,
    scale_ptr,
    row,
    KV_HEADS: tl.constexpr,
    CODE: tl.constexpr,
    LARGEST: tl.constexpr,
    STATIC: tl.constexpr,
):
    """What each head's vector is divided by: 1 where the cache has no scales, the static one, or what the reference
    chooses; the scale that goes with that is written then."""
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
                error = rounding_error(a, a_weight, inverse, CODE)
                if PIECES > 1:
                    error += rounding_error(b, b_weight, inverse, CODE)
                if PIECES > 2:
                    error += rounding_error(c, c_weight, inverse, CODE)
                error *= _SCALE_STEPS[i] * _SCALE_STEPS[i]
                best = tl.where(error < best_error, least * _SCALE_STEPS[i], best)
                best_error = tl.where(error < best_error, error, best_error)
        scale = best
        if CODE != "int8":
            products, squares = _fit(a, a_weight, best, CODE)
            if PIECES > 1:
                more_products, more_squares = _fit(b, b_weight, best, CODE)
                products += more_products
                squares += more_squares
            if PIECES > 2:
                more_products, more_squares = _fit(c, c_weight, best, CODE)
                products += more_products
                squares += more_squares
            ratio = products / squares
            scale = tl.where(ratio > 0, best * ratio, best)
        tl.store(scale_ptr + row, scale, head < KV_HEADS)
    return best


@triton.jit
def _fit(x, weight, divisor, CODE: tl.constexpr):
    """Products of values and codes, and squares of codes, summed over each head: their ratio is the best scale."""
    wide = x.to(tl.float32)
    divided = tl.math.div_rn(wide, tl.broadcast_to(divisor, wide.shape))
    codes = coded(divided, CODE)
    weighted = codes * weight
    return tl.sum(weighted * divided, axis=1, keep_dims=True), tl.sum(weighted * codes, axis=1, keep_dims=True)


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
