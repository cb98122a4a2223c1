"""Where min-p, top-k and top-p cut each row, in Triton: exactly, and the same in each run. Called by gpu.py.

The scaled logits are at most 0, so the bits of their magnitudes, as integers, order them. The range in which the cut
lies is halved by counting or weighing the whole row, until at most MOST logits are in it; these are gathered and halved
on without memory traffic. The first guess comes from the highest logits of tiles, of which as many as the j-th highest
are at least j logits: it mostly leaves one pass to weigh and one to gather.
Qrita (arXiv 2602.01518) searches by pivots likewise, from a Gaussian guess."""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import triton
import triton.language as tl
from batchinfer.kernels.sampling.gpu_noise import log
from batchinfer.kernels.sampling.gpu_rows import is_changed, load_logits

INFINITE_KEY: tl.constexpr = tl.constexpr(0x7F800000)


@triton.jit
def key_of(scaled):
    """int32, the lower the higher the logit."""
    return tl.abs(scaled).to(tl.int32, bitcast=True)


@triton.jit
def logit_of(key):
    return -key.to(tl.float32, bitcast=True)


@triton.jit
def _reaches(keys, weights, low, high, target):
    """The least key from `low` to `high` up to which, itself included, the weights sum to `target`; `high` if none."""
    for _ in range(31):
        middle = low + (high - low) // 2
        is_enough = tl.sum(tl.where(keys <= middle, weights, 0.0), axis=0) >= target
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough | (low >= high), low, middle + 1)
    return high


@triton.jit
def _weight(scaled, WEIGHED: tl.constexpr):
    return tl.exp(scaled) if WEIGHED else tl.where(scaled == scaled, 1.0, 0.0)


@triton.jit
def _weigh(
    row_logits,  # (logits, stride, row, changed): load_logits's
    scale,  # (highest, temperature)
    last,  # keys beyond it do not count
    middle,
    vocab_size,
    BLOCK: tl.constexpr,
    WEIGHED: tl.constexpr,
):
    """(weight up to key `middle`, number of logits up to it, weight up to key `last`)."""
    weight = tl.zeros((BLOCK,), tl.float32)
    whole = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logits = load_logits(row_logits[0], row_logits[1], row_logits[2], row_logits[3], token, vocab_size)
        scaled = tl.div_rn(logits - scale[0], scale[1])
        key = key_of(scaled)
        own = tl.where((key <= last) & (token < vocab_size), _weight(scaled, WEIGHED), 0.0)
        whole += own
        weight += tl.where(key <= middle, own, 0.0)
        count += ((key <= middle) & (key <= last) & (token < vocab_size)).to(tl.int32)
    return tl.sum(weight, axis=0), tl.sum(count, axis=0), tl.sum(whole, axis=0)


@triton.jit
def _gather(
    row_logits,
    scale,
    low,
    high,
    out_ptr,  # float32 [MOST] of the row
    vocab_size,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    """The first MOST logits with keys from low to high, by token; -inf fills the rest."""
    count = tl.zeros((), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logits = load_logits(row_logits[0], row_logits[1], row_logits[2], row_logits[3], token, vocab_size)
        scaled = tl.div_rn(logits - scale[0], scale[1])
        key = key_of(scaled)
        is_kept = ((key >= low) & (key <= high) & (token < vocab_size)).to(tl.int32)
        place = count + tl.cumsum(is_kept, axis=0) - 1
        tl.store(out_ptr + place, scaled, (is_kept > 0) & (place < MOST))
        count += tl.sum(is_kept, axis=0)
    tl.debug_barrier()  # other threads of the program read what this one wrote
    place = tl.arange(0, MOST)
    return tl.load(out_ptr + place, place < count, float("-inf"))


@triton.jit
def _search(
    row_logits,
    scale,
    last,  # what has a key beyond it is dropped already
    guess,  # a key
    target,  # of the weight; of the share of all weight where WEIGHED
    out_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    WEIGHED: tl.constexpr,
):
    """(key of the last logit kept, logits [MOST] in reach, whether these are all that are kept)."""
    low = tl.zeros((), tl.int32)
    high = last
    above = tl.zeros((), tl.float32)  # weight of keys below `low`
    num_above = tl.zeros((), tl.int32)
    num_up_to = tl.zeros((), tl.int32) + vocab_size
    wanted = tl.zeros((), tl.float32) + target
    middle = tl.minimum(guess, last)
    is_first = tl.full((), 1, tl.int32)
    while (is_first > 0) | ((num_up_to - num_above > MOST) & (low < high)):
        weight, count, whole = _weigh(row_logits, scale, last, middle, vocab_size, BLOCK, WEIGHED)
        if WEIGHED:
            wanted = whole * target
        is_enough = (weight >= wanted) | (middle >= last)
        is_little = whole < wanted  # fewer than top_k were left: nothing is cut
        high = tl.where(is_enough, middle, high)
        num_up_to = tl.where(is_enough, count, num_up_to)
        low = tl.where(is_little, high, tl.where(is_enough, low, middle + 1))
        above = tl.where(is_enough, above, weight)
        num_above = tl.where(is_enough, num_above, count)
        middle = low + (high - low) // 2
        is_first = is_first * 0
    scaled = _gather(row_logits, scale, low, high, out_ptr, vocab_size, BLOCK, MOST)
    key = key_of(scaled)
    weights = tl.where((key >= low) & (key <= high), _weight(scaled, WEIGHED), 0.0)
    return _reaches(key, weights, low, high, wanted - above), scaled, (low == 0) & (num_up_to <= MOST)


@triton.jit
def _guess(tops_ptr, scale, number, num_known, num_tiles, TILES_BLOCK: tl.constexpr):
    """The key of the `number`-th highest of the highest logits of num_known tiles, of num_tiles in memory."""
    tile = tl.arange(0, TILES_BLOCK)
    top = tl.load(tops_ptr + tile, tile < num_tiles, float("-inf"))
    key = key_of(tl.div_rn(top - scale[0], scale[1]))
    low, high = tl.zeros((), tl.int32), tl.full((), INFINITE_KEY, tl.int32)
    return _reaches(key, tl.where(tile < num_known, 1.0, 0.0), low, high, number.to(tl.float32))


@triton.jit(do_not_specialize_on_alignment=["offsets", "parameters"])
def find_cuts(
    logits,  # as load_logits's
    stride,
    offsets,  # of the changes
    tops_ptr,  # float32 [n, num_tiles], as find_tops's
    highest_ptr,  # float32 [n], as pick_highest's
    parameters,  # (temperature, min_p float32, top_k int64, top_p float32) [n]
    room_ptr,  # float32 [n, MOST]
    cuts_ptr,  # float32 [n]: the lowest scaled logit that is kept
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    TILES_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature, highest = tl.load(parameters[0] + row), tl.load(highest_ptr + row)
    if (temperature <= 0) | (highest != highest):
        return
    min_p, top_k = tl.load(parameters[1] + row), tl.load(parameters[2] + row)
    top_p = tl.load(parameters[3] + row)
    last = tl.full((), INFINITE_KEY, tl.int32)
    if min_p > 0:
        last = key_of(tl.minimum(log(min_p), 0.0))
    has_k = (top_k > 0) & (top_k < vocab_size)
    if has_k | (top_p < 1):
        row_logits = (logits, stride, row, is_changed(row, offsets))
        scale = (highest, temperature)
        tops_ptr += row * num_tiles
        place = room_ptr + row * MOST
        num_known = (tl.zeros((), tl.int32) + vocab_size + TILE - 1) // TILE
        most = num_known - num_known // 8  # tiles of tokens that no text has would spoil the guess
        share = tl.zeros((), tl.float32) + top_p
        is_done = top_p >= 1
        if has_k:
            guess = _guess(tops_ptr, scale, tl.minimum(top_k, most).to(tl.int32), num_known, num_tiles, TILES_BLOCK)
            target = top_k.to(tl.float32)
            last, kept, are_all = _search(row_logits, scale, last, guess, target, place, vocab_size, BLOCK, MOST, False)
            if are_all & (is_done == 0):
                key = key_of(kept)
                weights = tl.where(key <= last, tl.exp(kept), 0.0)
                low = tl.zeros((), tl.int32)
                last = _reaches(key, weights, low, last, share * tl.sum(weights, axis=0))
            is_done = is_done | are_all
            tl.debug_barrier()  # before the room is used again
        if is_done == 0:
            guess = _guess(tops_ptr, scale, most, num_known, num_tiles, TILES_BLOCK)
            last, kept, are_all = _search(row_logits, scale, last, guess, share, place, vocab_size, BLOCK, MOST, True)
    tl.store(cuts_ptr + row, logit_of(last))
