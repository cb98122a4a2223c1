"""Python values of Arrow columns, with columns that carry JSON text decoded. Used where rows become prompts and
sampling parameters."""

import json
from typing import Any

import pyarrow as pa

from batchinfer.data.jsonl_schema import is_json_text

_NOT_REPRESENTABLE = (OverflowError, ValueError, pa.ArrowException)


def column_values(batch: pa.RecordBatch, name: str) -> list[Any] | None:
    """The column's values, one a row; None where the batch has no such column."""
    index = batch.schema.get_field_index(name)
    if index < 0:
        return None
    values = batch.column(index).to_pylist()
    if is_json_text(batch.schema.field(index)):
        return [None if value is None else json.loads(value) for value in values]
    return values


def representable_values(batch: pa.RecordBatch, name: str) -> list[Any] | None:
    """The same, with None for values that Python cannot represent: a date beyond the year 9999, text that is not UTF-8,
    a time in an unknown zone."""
    try:
        return column_values(batch, name)
    except _NOT_REPRESENTABLE:
        return [_representable(batch.slice(row, 1), name) for row in range(batch.num_rows)]


def _representable(row: pa.RecordBatch, name: str) -> Any:
    try:
        return (column_values(row, name) or [None])[0]
    except _NOT_REPRESENTABLE:
        return None


def is_missing(value: object) -> bool:
    """Null, or the NaN that stands for null in tables that went through pandas."""
    return value is None or (isinstance(value, float) and value != value)
