"""Reads the rows of any shard in bounded slices, from any row on: for prompts (chosen columns) and for the output (all
columns). Called by the pipeline and the writer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinfer.data.files import locate, naming_faults
from batchinfer.data.jsonl import INDEX_STRIDE, LineError, error_message, iter_lines, open_lines, parse_line, skip_to
from batchinfer.data.jsonl_schema import rows_to_batch
from batchinfer.data.parquet_input import SLICE_BYTES, iter_parquet
from batchinfer.data.saved_dataset import iter_arrow
from batchinfer.data.shards import Shard
from batchinfer.errors import BatchInferError

_CHANGED = "it changed or went away while the job ran; put it back and run the same command again"


@dataclass(frozen=True)
class RowBatch:
    """Consecutive rows of a shard. start: row number of the first. errors: offset in the batch -> why that line is
    unreadable; all columns of such a row are null."""

    start: int
    table: pa.RecordBatch
    errors: Mapping[int, str] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return int(self.table.num_rows)

    def slice(self, offset: int, length: int) -> "RowBatch":
        """Rows [offset, offset + length) of the batch, without a copy."""
        errors = {i - offset: message for i, message in self.errors.items() if offset <= i < offset + length}
        return RowBatch(self.start + offset, self.table.slice(offset, length), errors)

    def runs(self, wanted: npt.NDArray[np.bool_]) -> Iterator["RowBatch"]:
        """The stretches of consecutive rows that are wanted. wanted: bool [num_rows]."""
        edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False))
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            yield self.slice(begin, end - begin)


def iter_rows(
    shard: Shard, start: int, stop: int | None, columns: Sequence[str] | None = None, batch_rows: int = 1024
) -> Iterator[RowBatch]:
    """Rows [start, stop) in order, in slices of at most `batch_rows` rows and about 32 MiB.

    columns: in the order wanted; None for all. Where none is wanted the batches hold the first column, as Arrow
    counts the rows of a batch by its columns. One call over a long range is far cheaper than many over short ones: a
    Parquet row group or a compressed file is read from its beginning each time.

    Raises BatchInferError where the file is no longer as it was discovered, KeyError for an unknown column.
    """
    stop = shard.num_rows if stop is None else min(stop, shard.num_rows)
    names = shard.schema.names if columns is None else columns or shard.schema.names[:1]
    schema = pa.schema([shard.schema.field(name) for name in names], shard.schema.metadata if columns is None else None)
    position = start
    with naming_faults(shard.uri, BatchInferError, _CHANGED):
        for batch in _iter_format(shard, schema, start, stop, batch_rows):
            yield batch
            position += batch.num_rows
    if position < stop:
        raise BatchInferError(f"{shard.uri}: ends at row {position} of {shard.num_rows}: {_CHANGED}")


def iter_selected(
    shard: Shard,
    selection: npt.NDArray[np.int64] | None,
    start: int = 0,
    stop: int | None = None,
    columns: Sequence[str] | None = None,
    batch_rows: int = 1024,
) -> Iterator[RowBatch]:
    """As `iter_rows`, but only the selected rows, in batches of consecutive ones.

    selection: sorted row numbers of the shard, from `select_rows`; None for all.
    """
    if selection is None:
        yield from iter_rows(shard, start, stop, columns, batch_rows)
        return
    stop = shard.num_rows if stop is None else stop
    within = selection[np.searchsorted(selection, start) : np.searchsorted(selection, stop)]
    if not len(within):
        return
    for batch in iter_rows(shard, int(within[0]), int(within[-1]) + 1, columns, batch_rows):
        bounds = np.searchsorted(within, [batch.start, batch.start + batch.num_rows])
        wanted = np.zeros(batch.num_rows, np.bool_)
        wanted[within[bounds[0] : bounds[1]] - batch.start] = True
        yield from batch.runs(wanted)


def _iter_format(shard: Shard, schema: pa.Schema, start: int, stop: int, batch_rows: int) -> Iterator[RowBatch]:
    if start >= stop:
        return
    if shard.format == "jsonl":
        yield from _iter_jsonl(shard, schema, start, stop, batch_rows)
        return
    read = iter_parquet if shard.format == "parquet" else iter_arrow
    for row, batch in read(shard.uri, schema, start, stop, batch_rows):
        yield RowBatch(row, batch)


def _iter_jsonl(shard: Shard, schema: pa.Schema, start: int, stop: int, batch_rows: int) -> Iterator[RowBatch]:
    rows: list[Mapping[str, object]] = []
    errors: dict[int, str] = {}
    size_bytes = 0
    for row, size, error in _iter_parsed(shard, start, stop):
        if rows and (len(rows) == batch_rows or size_bytes + size > SLICE_BYTES):
            yield _json_batch(shard, schema, start, rows, errors)
            start += len(rows)
            rows, errors, size_bytes = [], {}, 0
        if error:
            errors[len(rows)] = error
        rows.append(row)
        size_bytes += size
    if rows:
        yield _json_batch(shard, schema, start, rows, errors)


def _json_batch(
    shard: Shard, schema: pa.Schema, start: int, rows: Sequence[Mapping[str, object]], errors: Mapping[int, str]
) -> RowBatch:
    try:
        return RowBatch(start, rows_to_batch(rows, schema), errors)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise BatchInferError(f"{shard.uri}: rows from {start} on hold other types than before: {_CHANGED}") from error


def _iter_parsed(shard: Shard, start: int, stop: int) -> Iterator[tuple[Mapping[str, object], int, str | None]]:
    """(row, length of its line in bytes, error message) of rows [start, stop); an unreadable row is empty."""
    location, index = locate(shard.uri), shard.line_index
    if index is None:
        raise ValueError(f"{shard.uri}: a jsonl shard needs its line index")
    mark = start // INDEX_STRIDE
    offset, number = int(index.offsets[mark]), int(index.numbers[mark])
    with location.open() as raw, open_lines(raw, location.name) as stream:
        skip_to(stream, raw, offset, compressed=location.name.endswith((".gz", ".zst")))
        for row, line in enumerate(iter_lines(stream, number, offset), mark * INDEX_STRIDE):
            if row >= stop:
                return
            if row < start:
                continue
            try:
                yield parse_line(line.data), len(line.data), None
            except LineError as error:
                yield {}, len(line.data), error_message(line.number, error)
