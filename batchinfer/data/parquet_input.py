"""Reads Parquet shards in slices bounded by rows and bytes, starting anywhere. Used by discovery (schema, number of
rows) and by the row reader."""

import contextlib
import os
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.arrow_types import cast_batch, restored_schema
from batchinfer.data.files import Location, locate

SLICE_BYTES = 32 << 20  # of decoded data a slice; Arrow cannot decode nested columns beyond 2 GiB at once
_READ_BUFFER_BYTES = 1 << 20
_PROBE_ROWS = 16


@contextlib.contextmanager
def open_parquet(location: Location) -> Iterator[pq.ParquetFile]:
    """The file with small read buffers: a row group is streamed, never held whole."""
    # As bytes: Arrow cannot encode a name that is not UTF-8.
    source = pa.OSFile(os.fsencode(location.path), "rb") if location.is_local else location.open()
    try:
        with pq.ParquetFile(source, buffer_size=_READ_BUFFER_BYTES, pre_buffer=False) as file:
            yield file
    finally:
        source.close()


def inspect_parquet(location: Location) -> tuple[pa.Schema, int]:
    """(schema as it is passed on, number of rows)."""
    with open_parquet(location) as file:
        return restored_schema(file), file.metadata.num_rows


def iter_parquet(
    uri: str, schema: pa.Schema, start: int, stop: int, batch_rows: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(row number, slice) over rows [start, stop) in the columns and types of `schema`. Row groups outside the range
    are not decoded; the rows before `start` in its own row group are."""
    with open_parquet(locate(uri)) as file:
        size = min(batch_rows, _rows_that_fit(file, schema.names, start))
        while start < stop:
            try:
                for batch in _decode(file, schema.names, start, stop, size):
                    for part in split_by_bytes(cast_batch(batch, schema)):
                        yield start, part
                        start += part.num_rows
                    if size > 1 and batch.nbytes > 2 * SLICE_BYTES:
                        size = max(1, min(size // 2, size * SLICE_BYTES // batch.nbytes))
                        break  # rows became larger: go on from here in smaller slices
                else:
                    return
            except pa.ArrowNotImplementedError:
                if size == 1:
                    raise
                size = max(1, size // 8)  # a nested column of this slice exceeds Arrow's 2 GiB


def _decode(file: pq.ParquetFile, columns: Sequence[str], start: int, stop: int, size: int) -> Iterator[pa.RecordBatch]:
    """Batches of at most `size` rows that cover [start, stop)."""
    first_row, groups = _row_groups(file, start, stop)
    position = first_row
    for batch in file.iter_batches(size, row_groups=groups, columns=list(columns)):
        end = position + batch.num_rows
        first, last = max(start, position), min(stop, end)
        if first < last:
            yield batch.slice(first - position, last - first)
        position = end
        if position >= stop:
            return


def _row_groups(file: pq.ParquetFile, start: int, stop: int) -> tuple[int, list[int]]:
    """(first row of the first row group, indices) of the row groups that hold [start, stop)."""
    groups: list[int] = []
    first_row = position = 0
    for index in range(file.metadata.num_row_groups):
        end = position + file.metadata.row_group(index).num_rows
        if end > start and position < stop:
            first_row = first_row if groups else position
            groups.append(index)
        position = end
    return first_row, groups


def _rows_that_fit(file: pq.ParquetFile, columns: Sequence[str], start: int) -> int:
    """How many rows make SLICE_BYTES, by the sizes in the footer and, since dictionary pages hide long repeated values,
    by a few rows decoded."""
    _, groups = _row_groups(file, start, file.metadata.num_rows)
    if not groups:
        return 1
    row_bytes = max(_encoded_row_bytes(file, columns, group) for group in groups)
    probe = next(file.iter_batches(_PROBE_ROWS, row_groups=groups[:1], columns=list(columns)))
    row_bytes = max(row_bytes, probe.nbytes / probe.num_rows)
    return max(1, int(SLICE_BYTES / max(row_bytes, 1)))


def _encoded_row_bytes(file: pq.ParquetFile, columns: Sequence[str], group: int) -> float:
    metadata = file.metadata.row_group(group)
    chunks = (metadata.column(index) for index in range(metadata.num_columns))
    prefixes = tuple(f"{name}." for name in columns)
    wanted = (chunk for chunk in chunks if chunk.path_in_schema in columns or chunk.path_in_schema.startswith(prefixes))
    return sum(chunk.total_uncompressed_size for chunk in wanted) / max(metadata.num_rows, 1)


def split_by_bytes(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Halves a batch until each part is within SLICE_BYTES or a single row."""
    if batch.num_rows <= 1 or batch.nbytes <= SLICE_BYTES:
        yield batch
        return
    half = batch.num_rows // 2
    yield from split_by_bytes(batch.slice(0, half))
    yield from split_by_bytes(batch.slice(half))
