"""Python values of Arrow columns, with columns that carry JSON text decoded. Used where rows become prompts and
sampling parameters."""

import json
from typing import Any

import pyarrow as pa

from batchinfer.data.jsonl_schema import is_json_text


def column_values(batch: pa.RecordBatch, name: str) -> list[Any] | None:
    """The column's values, one a row; None where the batch has no such column."""
    index = batch.schema.get_field_index(name)
    if index < 0:
        return None
    values = batch.column(index).to_pylist()
    if is_json_text(batch.schema.field(index)):
        return [None if value is None else json.loads(value) for value in values]
    return values


def is_missing(value: object) -> bool:
    """Null, or the NaN that stands for null in tables that went through pandas."""
    return value is None or (isinstance(value, float) and value != value)
