"""Gumbel noise in Triton, of the words that noise.py makes; and the logarithm that it and the filters take."""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import triton
import triton.language as tl

SQRT_HALF: tl.constexpr = tl.constexpr(0x3F3504F3)


@triton.jit
def log(x):
    """ln x of normal positive x, to 2e-7 of its value, which the hardware's lacks near 1: as log_vec in draw.h."""
    shifted = x.to(tl.int32, bitcast=True) - SQRT_HALF
    exponent = (shifted >> 23).to(tl.float32)
    m = ((shifted & 0x7FFFFF) + SQRT_HALF).to(tl.float32, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    p = square * (2.0 / 9) + (2.0 / 7)
    p = p * square + (2.0 / 5)
    p = p * square + (2.0 / 3)
    small = p * square * s + exponent * -2.12194440e-4
    return small + 2.0 * s + exponent * 0.693359375


@triton.jit
def gumbel(words):
    """-log(-log(1 - u)) with u in (0, 1) made of uint32 words. 1 - u is rounded; what that loses is added to its
    logarithm."""
    u = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604645e-8)
    rest = 1.0 - u
    lost = u - (1.0 - rest)
    return -log(lost - log(rest))


@triton.jit
def noise_of(key, position, first_group, GROUPS: tl.constexpr):
    """float32 [4 * GROUPS] for tokens from 4 * first_group on: token t takes word t % 4 of the counter (t // 4,
    position, 0, 0). key: int64 bits."""
    group = (first_group + tl.arange(0, GROUPS)).to(tl.uint32)
    zero = tl.zeros_like(group)
    place = zero + position.to(tl.uint32)
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(group, place, zero, zero, zero + low, zero + high)
    return gumbel(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))
