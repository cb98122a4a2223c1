"""Arrow types on their way through Parquet: which ones cannot be written, found before any inference, and which ones
reading changes and how they are restored. Called by shard discovery and the Parquet reader."""

import base64
import io

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.errors import UsageError


def check_columns(schema: pa.Schema, uri: str) -> None:
    """Raises UsageError where the output could not repeat the columns: a name that occurs twice, or a type that
    Parquet has no form for."""
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise UsageError(f"{uri}: the column name {name!r} occurs twice: rename one of the columns")
    for field in schema:
        reason = _unwritable(field)
        if reason:
            raise UsageError(
                f"{uri}: column {field.name!r} has type {field.type}, which cannot be passed on because Parquet cannot "
                f"hold it ({reason}): cast the column or leave it out of the input"
            )


def _unwritable(field: pa.Field) -> str | None:
    """Why Parquet cannot hold a column. Found by writing one null row, since that is what counts."""
    schema = pa.schema([field.with_nullable(True)])
    try:
        with pq.ParquetWriter(io.BytesIO(), schema) as writer:
            writer.write_table(pa.table([pa.nulls(1, field.type)], schema=schema))
    except pa.ArrowNotImplementedError as error:
        return str(error).splitlines()[0]
    return None


def restored_schema(file: pq.ParquetFile) -> pa.Schema:
    """The file's schema with the types that the writer declared in ARROW:schema and that reading narrows, as
    date64 to date32, wherever the way back loses nothing."""
    read = file.schema_arrow
    encoded = (file.metadata.metadata or {}).get(b"ARROW:schema")
    if encoded is None:
        return read
    declared = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(encoded)))
    if declared.names != read.names:
        return read
    fields = [_restored_field(field, other) for field, other in zip(read, declared, strict=True)]
    return pa.schema(fields, metadata=read.metadata)


def _restored_field(read: pa.Field, declared: pa.Field) -> pa.Field:
    return read.with_type(_restored_type(read.type, declared.type))


def _restored_type(read: pa.DataType, declared: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_date32(read) and types.is_date64(declared):
        return declared
    if (types.is_string(read) and types.is_large_string(declared)) or (
        types.is_binary(read) and types.is_large_binary(declared)
    ):
        return declared
    if types.is_dictionary(read) and types.is_dictionary(declared):
        value_type = _restored_type(read.value_type, declared.value_type)
        return pa.dictionary(read.index_type, value_type, read.ordered)
    if types.is_struct(read) and types.is_struct(declared) and read.num_fields == declared.num_fields:
        return pa.struct([_restored_field(read.field(i), declared.field(i)) for i in range(read.num_fields)])
    if types.is_list(read) and types.is_list(declared):
        return pa.list_(_restored_field(read.value_field, declared.value_field))
    if types.is_large_list(read) and types.is_large_list(declared):
        return pa.large_list(_restored_field(read.value_field, declared.value_field))
    return read


def cast_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of `schema`, in its order and types, out of a batch as Parquet gave it."""
    columns = [_cast(batch.column(field.name), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _cast(column: pa.Array, target: pa.DataType) -> pa.Array:
    return column if column.type.equals(target) else column.cast(target)
