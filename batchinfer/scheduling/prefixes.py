"""Which prompts begin alike, in whole KV blocks. Used by order.py."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
TokenIds = npt.NDArray[np.int32]

_CHUNK_TOKENS = 1 << 20  # compared at once


def sort_by_beginning(prompts: Sequence[TokenIds], block_size: int) -> tuple[IntArray, IntArray]:
    """The prompts' indices in an order in which those with an equal beginning stand together, whatever its length, and
    the number of full blocks that each shares with the one before it, 0 for the first."""
    keys = [np.ascontiguousarray(prompt, np.int32).tobytes() for prompt in prompts]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = np.zeros(len(order), np.int64)
    lengths = np.fromiter((len(prompts[i]) for i in order), np.int64, len(order))
    ends = np.cumsum(lengths)
    start = 0
    while start < len(order):
        base = ends[start] - lengths[start]
        stop = max(start + 2, int(np.searchsorted(ends, base + _CHUNK_TOKENS)))
        tokens = [prompts[i] for i in order[start:stop]]
        shared[start + 1 : stop] = _common_tokens(np.concatenate(tokens), lengths[start:stop]) // block_size
        start = max(start + 1, stop - 1) if stop < len(order) else stop
    return np.array(order, np.int64), shared


def common_tokens(first: TokenIds, second: TokenIds) -> int:
    """How many tokens two prompts begin with in common."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def _common_tokens(tokens: TokenIds, lengths: IntArray) -> IntArray:
    """For each prompt but the first, how many tokens it has in common with the one before it [num_prompts - 1]. tokens:
    those of all prompts, one after the other."""
    starts = np.cumsum(lengths) - lengths
    common = np.minimum(lengths[:-1], lengths[1:])
    ends = np.cumsum(common)
    begins = ends - common
    offsets = np.arange(int(common.sum())) - np.repeat(begins, common)
    differs = tokens[np.repeat(starts[:-1], common) + offsets] != tokens[np.repeat(starts[1:], common) + offsets]
    places = np.append(np.flatnonzero(differs), len(offsets))
    first: IntArray = places[np.searchsorted(places[:-1], begins)]
    return np.minimum(first, ends) - begins
