"""Makes the single output file (.parquet, .jsonl) out of the finished parts, streaming. Called by the writer at the
end of a job, and before it to see that this will be possible."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import pyarrow as pa

from batchinfer.data.files import locate
from batchinfer.data.json_lines import to_lines
from batchinfer.data.output_layout import OutputLayout
from batchinfer.data.parquet_input import inspect_parquet, iter_parquet
from batchinfer.data.parts import RowGroupWriter, part_schema
from batchinfer.errors import UsageError

_BATCH_ROWS = 1024


def common_schema(layout: OutputLayout, schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The input columns of the whole file; a column that a shard lacks is null there. UsageError where the shards'
    types differ, or a column has no form in JSON."""
    try:
        schema = pa.unify_schemas(schemas)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as e:
        reason = " ".join(str(e).split())
        raise UsageError(f"--output {layout.target}: the shards' columns differ ({reason}); give a directory") from e
    if layout.file_format == "jsonl":
        _require_json(layout, schema)
    return schema


def _require_json(layout: OutputLayout, schema: pa.Schema) -> None:
    for field in schema:
        try:
            list(to_lines(pa.table([pa.nulls(1, field.type)], schema=pa.schema([field.with_nullable(True)]))))
        except (pa.ArrowException, ValueError, TypeError) as e:
            raise UsageError(f"--output {layout.target}: column {field.name!r} has no form in JSON: {e}") from e


def write_single_file(
    file: IO[bytes], layout: OutputLayout, parts: Iterable[str], input_schema: pa.Schema, metadata: Mapping[str, str]
) -> int:
    """parts: their full names, in order. input_schema: from common_schema. metadata: further file metadata, which
    .jsonl has no place for. Returns the number of rows."""
    if layout.file_format == "parquet":
        return _write_parquet(file, parts, input_schema, metadata)
    num_rows = 0
    with _compressed(file, layout.compression) as lines:
        for batch in _batches(parts):
            lines.write("".join(line + "\n" for line in to_lines(batch)).encode())
            num_rows += batch.num_rows
    return num_rows


def _write_parquet(file: IO[bytes], parts: Iterable[str], input_schema: pa.Schema, metadata: Mapping[str, str]) -> int:
    writer = None
    for batch in _batches(parts):
        if writer is None:
            appended = [f for f in batch.schema if f.name not in set(input_schema.names)]
            schema = part_schema(input_schema, pa.schema(appended), metadata)
            writer = RowGroupWriter(file, schema)
        writer.write(pa.Table.from_batches([_conform(batch, schema)]))
    if writer is None:
        raise ValueError("an output has at least one part")
    writer.close()
    return writer.num_written


def _conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of `schema`; null where the batch has none of that name."""
    present = set(batch.schema.names)
    columns = [
        batch.column(f.name).cast(f.type) if f.name in present else pa.nulls(batch.num_rows, f.type) for f in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _compressed(file: IO[bytes], compression: str | None) -> Any:
    sink = pa.PythonFile(file, mode="w")
    return sink if compression is None else pa.CompressedOutputStream(sink, compression)


def _batches(parts: Iterable[str]) -> Iterator[pa.RecordBatch]:
    """All rows in slices of bounded size."""
    for part in parts:
        schema, num_rows = inspect_parquet(locate(part))
        for _, batch in iter_parquet(part, schema, 0, num_rows, _BATCH_ROWS):
            yield batch
