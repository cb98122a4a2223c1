"""Reading logits, and what is known of rows and tiles of them: shared by the Triton kernels of sampling."""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import triton
import triton.language as tl


@triton.jit
def is_changed(row, offsets):
    """1 for a row with any changes, else 0. offsets: (bias, penalties, barred), int64 [n + 1] or None each."""
    count = tl.zeros((), tl.int64)
    if offsets[0] is not None:
        count += tl.load(offsets[0] + row + 1) - tl.load(offsets[0] + row)
    if offsets[1] is not None:
        count += tl.load(offsets[1] + row + 1) - tl.load(offsets[1] + row)
    if offsets[2] is not None:
        count += tl.load(offsets[2] + row + 1) - tl.load(offsets[2] + row)
    return (count > 0).to(tl.int32)


@triton.jit
def _is_left_out(row, offsets):
    """Whether offsets are given and the row has no changes."""
    left_out = tl.zeros((), tl.int32) if offsets is None else 1 - is_changed(row, offsets)
    return left_out > 0


@triton.jit
def load_logits(
    logits,  # ([n, vocab_size] rows `stride` apart, changed float32 [n, vocab_size] of rows with changes or None)
    stride,
    row,
    changed,  # as is_changed says
    token,
    vocab_size,
):
    """float32 of `token`'s shape; -inf beyond the vocabulary."""
    known, of_logits = token < vocab_size, (tl.zeros_like(token) + changed) == 0
    if logits[1] is None:
        values = tl.load(logits[0] + row * stride + token, known, float("-inf")).to(tl.float32)
    else:
        values = tl.load(logits[0] + row * stride + token, known & of_logits, float("-inf")).to(tl.float32)
        others = tl.load(logits[1] + row * vocab_size + token, known & (of_logits == 0), float("-inf"))
        values = tl.where(of_logits, values, others)
    return values


@triton.jit(do_not_specialize_on_alignment=["offsets"])
def find_tops(
    logits_ptr,  # [n, vocab_size], rows `stride` apart
    stride,
    offsets,  # as is_changed's: other rows are left out; None where all count
    tops_ptr,  # float32 [n, num_tiles]: the highest logit of each TILE tokens, NaN where one is; -inf of no tokens
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if _is_left_out(row, offsets):
        return
    tile = tl.program_id(1) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)
    token = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    values = tl.load(logits_ptr + row * stride + token, token < vocab_size, float("-inf")).to(tl.float32)
    has_nan = tl.max((values != values).to(tl.int32), axis=1) > 0
    top = tl.where(has_nan, float("nan"), tl.max(values, axis=1))
    tl.store(tops_ptr + row * num_tiles + tile, top, tile < num_tiles)


@triton.jit(do_not_specialize_on_alignment=["offsets"])
def pick_highest(
    logits_ptr,  # this and the next five as find_tops's
    stride,
    offsets,
    tops_ptr,
    vocab_size,
    num_tiles,
    token_ids_ptr,  # int64 [n]: the first token with the highest logit
    is_finite_ptr,  # bool [n]: whether that is finite; where offsets are given, whether it was so before, too
    highest_ptr,  # float32 [n]: that logit; NaN where is_finite is false
    TILE: tl.constexpr,
    TILES_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if _is_left_out(row, offsets):
        return
    tile = tl.arange(0, TILES_BLOCK)
    top = tl.load(tops_ptr + row * num_tiles + tile, tile < num_tiles, float("-inf"))
    has_nan = tl.max((top != top).to(tl.int32), axis=0) > 0
    highest = tl.max(tl.where(top == top, top, float("-inf")), axis=0)
    finite = (has_nan == 0) & (tl.abs(highest) < float("inf"))
    first = tl.min(tl.where(top == highest, tile, num_tiles - 1), axis=0)
    token = first * TILE + tl.arange(0, TILE)
    values = tl.load(logits_ptr + row * stride + token, token < vocab_size, float("-inf")).to(tl.float32)
    token_id = tl.min(tl.where((values == highest) & (token < vocab_size), token, vocab_size - 1), axis=0)
    if offsets is not None:
        before = tl.load(highest_ptr + row)
        finite = finite & (before == before)
    tl.store(token_ids_ptr + row, token_id.to(tl.int64))
    tl.store(is_finite_ptr + row, finite)
    tl.store(highest_ptr + row, tl.where(finite, highest, float("nan")))
