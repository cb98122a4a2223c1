"""Finds values that repeat in an id column, for --unique-id and for the warning about `custom_id`. Reads that column
only and keeps eight bytes a row, whatever the ids' length."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from batchinfer.data.readers import iter_rows
from batchinfer.data.shards import Shard, ShardSet
from batchinfer.errors import UsageError

_BATCH_ROWS = 8192


class Place(NamedTuple):
    """Index of the shard and row number in it."""

    shard: int
    row: int


class DuplicateId(NamedTuple):
    """A value and the first two places that were found to hold it."""

    value: Any
    first: Place
    second: Place


def find_duplicate_ids(shard_set: ShardSet, column: str, limit: int = 3) -> list[DuplicateId]:
    """The first repeats in input order, at most `limit`; empty where the column's values are distinct. Nulls count as
    absent. Raises UsageError where a shard lacks the column."""
    for shard in shard_set.shards:
        if column not in shard.schema.names:
            raise UsageError(f"{shard.uri}: there is no column {column!r}; the columns are {_names(shard)}")
    repeated = _repeated_hashes(shard_set, column)
    if not len(repeated):
        return []
    duplicates: list[DuplicateId] = []
    for first, second in _repeats(shard_set, column, repeated):
        value = _value_at(shard_set, column, second)
        if _value_at(shard_set, column, first) == value:  # else two values share a hash
            duplicates.append(DuplicateId(value, first, second))
        if len(duplicates) == limit:
            break
    return duplicates


def _names(shard: Shard) -> str:
    return ", ".join(shard.schema.names)


def _hashes(shard: Shard, column: str) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """(row numbers, hashes) of the rows that have an id, batch by batch."""
    for batch in iter_rows(shard, 0, None, [column], _BATCH_ROWS):
        values = batch.table.column(0)
        present = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False)).astype(np.int64)
        hashes = (hash(v) if isinstance(v, str) else hash(repr(v)) for v in values.drop_null().to_pylist())
        yield present + batch.start, np.fromiter(hashes, np.int64, len(present))


def _repeated_hashes(shard_set: ShardSet, column: str) -> npt.NDArray[np.int64]:
    """The hashes that occur more than once, sorted."""
    all_hashes = np.empty(shard_set.num_rows, np.int64)
    count = 0
    for shard in shard_set.shards:
        for _, hashes in _hashes(shard, column):
            all_hashes[count : count + len(hashes)] = hashes
            count += len(hashes)
    found = all_hashes[:count]
    found.sort()
    return np.unique(found[1:][found[1:] == found[:-1]])


def _repeats(shard_set: ShardSet, column: str, repeated: npt.NDArray[np.int64]) -> Iterator[tuple[Place, Place]]:
    """(place where the hash was first met, this place) for every further row with a repeated hash, in input order."""
    first_shard = np.full(len(repeated), -1, np.int32)
    first_row = np.empty(len(repeated), np.int64)
    for shard in shard_set.shards:
        for rows, hashes in _hashes(shard, column):
            slots = np.minimum(np.searchsorted(repeated, hashes), len(repeated) - 1)
            for offset in np.flatnonzero(repeated[slots] == hashes).tolist():
                slot = slots[offset]
                if first_shard[slot] < 0:
                    first_shard[slot], first_row[slot] = shard.index, rows[offset]
                else:
                    first = Place(int(first_shard[slot]), int(first_row[slot]))
                    yield first, Place(shard.index, int(rows[offset]))


def _value_at(shard_set: ShardSet, column: str, place: Place) -> Any:
    batch = next(iter_rows(shard_set.shards[place.shard], place.row, place.row + 1, [column]))
    return batch.table.column(0)[0].as_py()
