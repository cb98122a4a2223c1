"""Builds a part: the input rows of its range with their journaled results, streamed in row groups of bounded size.
Called by the writer once all of the part's rows are journaled."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.journal import Journal, expand_records
from batchinfer.data.readers import RowBatch
from batchinfer.data.row_map import Part, RowMap
from batchinfer.data.segments import byte_slices
from batchinfer.data.shards import Shard
from batchinfer.errors import BatchInferError

ReadRows = Callable[[Shard, int, int], Iterator[RowBatch]]

ROW_GROUP_ROWS = 16384
ROW_GROUP_BYTES = 64 << 20
_SLICE_BYTES = 32 << 20


def part_schema(shard_schema: pa.Schema, appended: pa.Schema, metadata: Mapping[str, str]) -> pa.Schema:
    """All input fields and the input's metadata, then the appended fields; metadata: further file metadata."""
    both = {**(shard_schema.metadata or {}), **{k.encode(): v.encode() for k, v in metadata.items()}}
    return pa.schema([*shard_schema, *appended], metadata=both)


class RowGroupWriter:
    """Parquet (zstd) in row groups of at most about ROW_GROUP_ROWS rows and ROW_GROUP_BYTES."""

    def __init__(self, file: IO[bytes], schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(pa.PythonFile(file, mode="w"), schema, compression="zstd")
        self._waiting: list[pa.Table] = []
        self._num_rows = 0
        self._nbytes = 0
        self.num_written = 0

    def write(self, table: pa.Table) -> None:
        self._waiting.append(table)
        self._num_rows += table.num_rows
        self._nbytes += table.nbytes
        if self._num_rows >= ROW_GROUP_ROWS or self._nbytes >= ROW_GROUP_BYTES:
            self._write_group()

    def _write_group(self) -> None:
        self._writer.write_table(pa.concat_tables(self._waiting))
        self.num_written += self._num_rows
        self._waiting, self._num_rows, self._nbytes = [], 0, 0

    def close(self) -> None:
        """Write what waits and the footer; not to be called after a failure, so that no footer covers a torn file."""
        if self._waiting:
            self._write_group()
        self._writer.close()


class PartBuilder:
    """Joins input rows and results. appended: the result columns with their prefix."""

    def __init__(
        self, shards: Sequence[Shard], rows: RowMap, journal: Journal, appended: pa.Schema, read_rows: ReadRows
    ) -> None:
        self._shards = shards
        self._rows = rows
        self._journal = journal
        self._appended = appended
        self._read_rows = read_rows

    def write(self, file: IO[bytes], part: Part, metadata: Mapping[str, str]) -> int:
        """Write the part's content to a file object; returns the number of output rows."""
        schema = part_schema(self._shards[part.shard].schema, self._appended, metadata)
        writer = RowGroupWriter(file, schema)
        for table in self._tables(part, schema):
            writer.write(table)
        writer.close()
        return writer.num_written

    def _tables(self, part: Part, schema: pa.Schema) -> Iterator[pa.Table]:
        position = part.start
        for batch in self._input(part):
            counts, answer_bytes = self._journal.layout(position, position + batch.num_rows)
            rows, samples = expand_records(counts)
            nbytes = answer_bytes.astype(np.int64) + _row_bytes(batch, int(counts.max()))
            for piece in byte_slices(nbytes[rows], _SLICE_BYTES, ROW_GROUP_ROWS):
                answers = self._journal.gather(position + rows[piece], samples[piece])
                columns = [*_take(batch, rows[piece]).columns, *answers.columns[-len(self._appended) :]]
                yield pa.Table.from_arrays(columns, schema=schema)
            position += batch.num_rows
        if position != part.stop:
            shard = self._shards[part.shard]
            raise BatchInferError(
                f"{shard.uri} has fewer rows than when the job started; put it back and run the same command again"
            )

    def _input(self, part: Part) -> Iterator[pa.RecordBatch]:
        """The part's input rows in order, the selected ones only."""
        wanted = self._rows.rows(part.shard, part.start, part.stop)
        for batch in self._read_rows(self._shards[part.shard], int(wanted[0]), int(wanted[-1]) + 1):
            first, last = np.searchsorted(wanted, [batch.start, batch.start + batch.table.num_rows])
            if first < last:
                yield _take(batch.table, wanted[first:last] - batch.start)


def _take(batch: pa.RecordBatch, rows: npt.NDArray[Any]) -> pa.RecordBatch:
    """rows: sorted; a slice, without a copy, where they follow each other."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows) and (np.diff(rows) == 1).all():
        return batch.slice(first, len(rows))
    return batch.take(pa.array(rows))


def _row_bytes(batch: pa.RecordBatch, repeats: int) -> npt.NDArray[np.int64]:
    """int64 [num_rows]: each row's share of the batch; exact where rows repeated so often would make slices large."""
    if batch.nbytes * repeats <= _SLICE_BYTES:
        return np.full(batch.num_rows, batch.nbytes // batch.num_rows, np.int64)
    return np.array([batch.slice(i, 1).nbytes for i in range(batch.num_rows)], np.int64)
