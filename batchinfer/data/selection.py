"""Which rows a job answers under --limit and --sample. A pure function of the input's shape, the numbers and the seed,
so that a resumed job selects the same rows."""

import numpy as np
import numpy.typing as npt

from batchinfer.data.row_map import Selection
from batchinfer.data.shards import ShardSet

_CHUNK_ROWS = 1 << 20


def select_rows(shard_set: ShardSet, limit: int | None, sample: int | None, seed: int) -> Selection:
    """For each shard the rows to answer: the first `limit` of the input, or `sample` rows drawn by `seed`.

    A larger sample under the same seed contains the smaller one. At most one of `limit` and `sample` may be given.
    """
    counts = [shard.num_rows for shard in shard_set.shards]
    total = sum(counts)
    if limit is not None and sample is not None:
        raise ValueError("limit and sample exclude each other")
    if limit is not None and limit < total:
        return _by_shard(np.arange(limit, dtype=np.int64), counts)
    if sample is not None and sample < total:
        return _by_shard(draw(total, sample, seed), counts)
    return (None,) * len(counts)


def _by_shard(rows: npt.NDArray[np.int64], counts: list[int]) -> Selection:
    """Splits sorted row numbers of the whole input by shard."""
    starts = np.concatenate([[0], np.cumsum(counts)])
    bounds = np.searchsorted(rows, starts)
    parts = (rows[bounds[i] : bounds[i + 1]] - starts[i] for i in range(len(counts)))
    return tuple(None if len(part) == count else part for part, count in zip(parts, counts, strict=True))


def draw(total: int, sample: int, seed: int) -> npt.NDArray[np.int64]:
    """`sample` distinct numbers below `total`, sorted: those with the smallest keys.

    Keys are splitmix64 (Steele, Lea, Flood 2014), a bijection, so there are no ties; NumPy's own generators may change
    between versions, and then a resumed job would select other rows.
    """
    best_keys = np.empty(0, np.uint64)
    best_rows = np.empty(0, np.int64)
    for start in range(0, total, _CHUNK_ROWS):
        rows = np.arange(start, min(start + _CHUNK_ROWS, total), dtype=np.int64)
        best_rows = np.concatenate([best_rows, rows])
        best_keys = np.concatenate([best_keys, _splitmix64(rows, seed)])
        if len(best_keys) > sample:
            keep = np.argpartition(best_keys, sample - 1)[:sample]
            best_keys, best_rows = best_keys[keep], best_rows[keep]
    return np.sort(best_rows)


def _splitmix64(rows: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.uint64]:
    base = _mix(np.array([seed % 2**64], np.uint64))  # else neighbouring seeds would draw shifted samples
    return _mix(base + (rows.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
