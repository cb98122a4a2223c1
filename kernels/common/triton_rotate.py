"""The rotation of one token's heads, shared by the Triton kernels of rotary and kv_store."""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import triton
import triton.language as tl


@triton.jit
def load_rotated(
    x_ptr,  # first value of the token's first head
    head_stride,
    cos_sin_ptr,  # [ROTARY_DIM]: the token's cosines, then sines
    NUM_HEADS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Both rotated halves, each [HEADS, BLOCK] in x's dtype, zeros beyond NUM_HEADS and ROTARY_DIM / 2."""
    half: tl.constexpr = ROTARY_DIM // 2
    head = tl.arange(0, HEADS)[:, None]
    place = tl.arange(0, BLOCK)[None, :]
    mask = (head < NUM_HEADS) & (place < half)
    cos = tl.load(cos_sin_ptr + place, place < half, 0.0)
    sin = tl.load(cos_sin_ptr + half + place, place < half, 0.0)
    at = x_ptr + head * head_stride + place
    first = tl.load(at, mask, 0.0).to(tl.float32)
    second = tl.load(at + half, mask, 0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def load_rest(
    x_ptr,
    head_stride,
    NUM_HEADS: tl.constexpr,
    FIRST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Values FIRST to HEAD_DIM of each head, [HEADS, BLOCK], zeros beyond."""
    head = tl.arange(0, HEADS)[:, None]
    place = FIRST + tl.arange(0, BLOCK)[None, :]
    return tl.load(x_ptr + head * head_stride + place, (head < NUM_HEADS) & (place < HEAD_DIM), 0.0)


@triton.jit
def rotate_token(
    x_ptr,
    head_stride,
    cos_sin_ptr,
    out_ptr,  # [NUM_HEADS, HEAD_DIM] of the token, contiguous
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """Writes a token's rotated heads; REST: block of the dimensions that are not rotated, 0 where all are."""
    half: tl.constexpr = ROTARY_DIM // 2
    head = tl.arange(0, HEADS)[:, None]
    place = tl.arange(0, BLOCK)[None, :]
    mask = (head < NUM_HEADS) & (place < half)
    first, second = load_rotated(x_ptr, head_stride, cos_sin_ptr, NUM_HEADS, ROTARY_DIM, HEADS, BLOCK)
    at = out_ptr + head * HEAD_DIM + place
    tl.store(at, first, mask)
    tl.store(at + half, second, mask)
    if REST > 0:
        rest = load_rest(x_ptr, head_stride, NUM_HEADS, ROTARY_DIM, HEAD_DIM, HEADS, REST)
        rest_place = ROTARY_DIM + tl.arange(0, REST)[None, :]
        tl.store(out_ptr + head * HEAD_DIM + rest_place, rest, (head < NUM_HEADS) & (rest_place < HEAD_DIM))


def rotation_sizes(head_dim: int, rotary_dim: int) -> dict[str, int]:
    """The sizes that the functions above take from a head."""
    rest = head_dim - rotary_dim
    return {
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "BLOCK": triton.next_power_of_2(max(1, rotary_dim // 2)),
        "REST": triton.next_power_of_2(rest) if rest else 0,
    }
