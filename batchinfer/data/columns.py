"""Python values of Arrow columns, with columns that carry JSON text decoded. Used where rows become prompts and
sampling parameters."""

import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from batchinfer.data.jsonl_schema import is_json_text
from batchinfer.errors import first_line

_NOT_REPRESENTABLE = (OverflowError, ValueError, pa.ArrowException)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands where Python cannot represent a value: text that is not UTF-8, a date beyond the year 9999, a time in an
    unknown zone."""

    reason: str


def column_values(batch: pa.RecordBatch, name: str) -> list[Any] | None:
    """The column's values, one a row, Unreadable ones among them; None where the batch has no such column."""
    index = batch.schema.get_field_index(name)
    if index < 0:
        return None
    is_json = is_json_text(batch.schema.field(index))
    try:
        return _read(batch.column(index), is_json)
    except _NOT_REPRESENTABLE:  # then one after the other
        return [_read_one(batch.column(index).slice(row, 1), is_json) for row in range(batch.num_rows)]


def _read(column: pa.Array, is_json: bool) -> list[Any]:
    values = column.to_pylist()
    return [None if value is None else json.loads(value) for value in values] if is_json else values


def _read_one(value: pa.Array, is_json: bool) -> Any:
    try:
        return _read(value, is_json)[0]
    except _NOT_REPRESENTABLE as error:
        return Unreadable(first_line(error))


def is_missing(value: object) -> bool:
    """Null, or the NaN that stands for null in tables that went through pandas."""
    return value is None or (isinstance(value, float) and value != value)
