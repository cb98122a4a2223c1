"""Finished rows, safe on storage: series of immutable segments and the index from a row to its place in them. The
writer appends, gathers and releases; a restart recovers the index from the segments alone."""

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinfer.data import segments
from batchinfer.data.result_schema import TALLY_COLUMNS, Tally
from batchinfer.data.row_map import Positions, RowMap
from batchinfer.data.segments import KEYS, MAX_RECORDS, BatchReader, Records, Row, byte_slices
from batchinfer.data.storage import Storage

_log = logging.getLogger(__name__)
_SLICE_BYTES = 32 << 20
_FAN_OUT = 32  # so many segments of one level become one of the next: few files, each row rewritten a few times at most
_MAX_MERGED_BYTES = 512 << 20  # larger segments are few enough to be left alone
_TOP_LEVEL = 9

_ABSENT = -1  # values of _Index.segment beside segment ids
_CLOSED = -2  # the row stands in a part


@dataclass(slots=True)
class _Segment:
    name: str
    level: int
    batch_starts: npt.NDArray[np.int64]  # [num_batches + 1] records before each batch
    nbytes: int  # decoded
    num_live_rows: int  # rows that no part holds yet


class _Index:
    """Place of each row by position, 16 bytes a row."""

    def __init__(self, num_rows: int) -> None:
        self.segment = np.full(num_rows, _ABSENT, np.int32)
        self.offset = np.zeros(num_rows, np.int32)  # record number in the segment
        self.count = np.zeros(num_rows, np.int32)  # records: one a sample
        self.nbytes = np.zeros(num_rows, np.int32)  # of the row's largest record, saturated


class Journal:
    """The rows journaled in a folder; its own segments bear its writer_id, so that many writers can share the folder.

    Two threads at most: append() in one, gather(), release() and compact() in the other; has() and mask() anywhere.
    """

    def __init__(self, storage: Storage, folder: str, writer_id: str, result_schema: pa.Schema, rows: RowMap) -> None:
        """result_schema: without prefix."""
        self._storage = storage
        self._folder = folder
        self._writer_id = writer_id
        self._schema = pa.schema([*KEYS, *result_schema])
        self._rows = rows
        self._index = _Index(rows.num_rows)
        self._segments: dict[int, _Segment] = {}
        self._next_id = 0
        self._next_number = 0
        self._reader = BatchReader(storage)
        self._lock = threading.Lock()  # guards _segments, _next_id and _next_number
        self.tally = Tally()

    def has(self, position: int) -> bool:
        return bool(self._index.segment[position] != _ABSENT)

    def mask(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """bool [stop - start]: which rows are safe, in a segment or in a part."""
        return self._index.segment[start:stop] != _ABSENT

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def append(self, rows: Iterable[Row]) -> Positions:
        """Write one segment; durable on return. A row that is safe already keeps its first answer. Returns the
        positions of the rows written."""
        fresh: dict[int, Row] = {}
        for row in rows:
            position = self._rows.position(row[0].id.shard, row[0].id.row)
            if not self.has(position):
                fresh.setdefault(position, row)
        positions = sorted(fresh)  # so that neighbours of a part share batches, in whatever order rows finish
        if positions:
            batches = segments.row_batches([fresh[position] for position in positions], self._schema)
            self._write(batches, level=0)
            for batch in batches:
                self.tally.add(batch)
        return np.array(positions, np.int64)

    def _write(self, batches: Iterable[pa.RecordBatch], level: int) -> None:
        with self._lock:
            number = self._next_number
            self._next_number += 1
        name = f"{self._folder}/{segments.segment_name(number, level, self._writer_id)}"
        records: list[Records] = []
        with self._storage.create(name) as file:
            segments.write_batches(file, self._schema, _observe(batches, records))
        self._enter(name, level, records, only_absent=False)

    def _enter(self, name: str, level: int, batches: Sequence[Records], *, only_absent: bool) -> Positions:
        """Put the rows of a segment into the index; returns the positions entered."""
        if not batches:
            return np.zeros(0, np.int64)
        starts = np.cumsum([0, *(len(b.row) for b in batches)])
        records = _concatenate(batches)
        firsts = np.flatnonzero(records.sample == 0)
        positions = self._rows.positions(records.shard[firsts], records.row[firsts])
        largest = np.minimum(np.maximum.reduceat(records.nbytes, firsts), np.iinfo(np.int32).max)
        if only_absent:
            keep = (self._index.segment[positions] == _ABSENT) & _is_first(positions)
            positions, firsts, largest = positions[keep], firsts[keep], largest[keep]
        if len(positions):
            with self._lock:
                segment_id = self._next_id
                self._next_id += 1
                self._segments[segment_id] = _Segment(name, level, starts, int(records.nbytes.sum()), len(positions))
            self._index.offset[positions] = firsts
            self._index.count[positions] = records.num_samples[firsts]
            self._index.nbytes[positions] = largest
            self._index.segment[positions] = segment_id  # last: it makes the rows known
        return positions

    def recover(self, closed: Iterable[tuple[int, int]] = ()) -> None:
        """Rebuild the index from what the folder holds. closed: ranges [start, stop) of positions that stand in parts.
        Segments that are damaged or hold nothing needed are deleted."""
        for start, stop in closed:
            self._index.segment[start:stop] = _CLOSED
        found = [m for name in self._storage.list(self._folder) if (m := segments.NAME.fullmatch(name))]
        found.sort(key=lambda m: (int(m["number"]), m["writer"]))
        self._next_number = int(found[-1]["number"]) + 1 if found else 0
        for match in found:
            name = f"{self._folder}/{match[0]}"
            if not self._recover_segment(name, int(match["level"])):
                self._storage.delete(name)

    def _recover_segment(self, name: str, level: int) -> bool:
        records: list[Records] = []
        tables = []
        try:
            for batch in _observe(segments.read_batches(self._storage, name, self._schema), records):
                tables.append(batch.select(["shard", "row", *TALLY_COLUMNS]))
        except (pa.ArrowException, OSError, ValueError) as e:
            _log.warning("%s is damaged (%s); its rows are computed again", self._storage.path(name), e)
            return False
        positions = self._enter(name, level, records, only_absent=True)
        for table in tables:
            entered = np.isin(self._rows.positions(table["shard"].to_numpy(), table["row"].to_numpy()), positions)
            self.tally.add(table.filter(pa.array(entered)))
        return len(positions) > 0

    def layout(self, start: int, stop: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """(records of each row, bytes of each row's largest record), int32 [stop - start]; for journaled rows."""
        return self._index.count[start:stop], self._index.nbytes[start:stop]

    def gather(self, positions: Positions, samples: npt.NDArray[Any]) -> pa.Table:
        """The records of the (position, sample) pairs, in that order: KEYS and the result columns. The caller bounds
        the bytes."""
        ids = self._index.segment[positions]
        records = self._index.offset[positions] + samples
        numbers = np.zeros(len(records), np.int64)  # of the record batch in its segment
        for segment_id in np.unique(ids).tolist():
            here = ids == segment_id
            starts = self._segments[segment_id].batch_starts
            numbers[here] = np.searchsorted(starts, records[here], side="right") - 1
        order = np.lexsort((records, ids))
        changes = (np.diff(ids[order]) != 0) | (np.diff(numbers[order]) != 0)
        pieces = []
        for run in np.split(order, np.flatnonzero(changes) + 1):
            segment = self._segments[int(ids[run[0]])]
            number = int(numbers[run[0]])
            batch = self._reader.batch(segment.name, number)
            pieces.append(batch.take(pa.array(records[run] - segment.batch_starts[number])))
        table = pa.Table.from_batches(pieces, self._schema)
        if np.array_equal(order, np.arange(len(order))):
            return table
        return table.combine_chunks().take(pa.array(np.argsort(order)))

    def release(self, start: int, stop: int) -> None:
        """Positions [start, stop) now stand in a part: segments that hold nothing else are deleted."""
        ids, counts = np.unique(self._index.segment[start:stop], return_counts=True)
        self._index.segment[start:stop] = _CLOSED
        for segment_id, count in zip(ids.tolist(), counts.tolist(), strict=True):
            segment = self._segments[segment_id]
            segment.num_live_rows -= count
            if segment.num_live_rows == 0:
                self._drop(segment_id)

    def _drop(self, segment_id: int) -> None:
        with self._lock:
            segment = self._segments.pop(segment_id)
        self._reader.forget(segment.name)
        self._storage.delete(segment.name)

    def needs_compaction(self) -> bool:
        return bool(self._crowd())

    def _crowd(self) -> list[int]:
        """Ids of the segments of the lowest level that has _FAN_OUT of them."""
        with self._lock:
            small = [(s.level, i) for i, s in self._segments.items() if s.nbytes < _MAX_MERGED_BYTES]
        for level in range(_TOP_LEVEL):
            ids = [i for own_level, i in small if own_level == level]
            if len(ids) >= _FAN_OUT:
                return ids
        return []

    def compact(self) -> None:
        """Merge crowded segments into one, sorted by row, and delete them after it is safe; a crash in between leaves
        rows twice, with equal contents."""
        while ids := self._crowd():
            level = self._segments[ids[0]].level
            positions = np.flatnonzero(np.isin(self._index.segment, ids))
            self._write(self._live_records(positions), level + 1)
            for segment_id in ids:
                self._drop(segment_id)

    def _live_records(self, positions: Positions) -> Iterator[pa.RecordBatch]:
        counts, nbytes = self._index.count[positions], self._index.nbytes[positions]
        rows, samples = expand_records(counts)
        for part in byte_slices(nbytes[rows], _SLICE_BYTES, MAX_RECORDS):
            yield from self.gather(positions[rows[part]], samples[part]).combine_chunks().to_batches()


def expand_records(counts: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(row, sample) of each record, where row i has counts[i] records one after the other."""
    rows = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts, dtype=np.int64) - counts
    return rows, np.arange(len(rows)) - starts[rows]


def _observe(batches: Iterable[pa.RecordBatch], records: list[Records]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        records.append(Records.of([batch]))
        yield batch


def _concatenate(batches: Sequence[Records]) -> Records:
    return Records(*(np.concatenate([getattr(b, name) for b in batches]) for name in Records.__slots__))


def _is_first(values: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which entries are the first of their value."""
    first = np.zeros(len(values), np.bool_)
    first[np.unique(values, return_index=True)[1]] = True
    return first
