"""Arrow batches as lines of JSON that keep each value: text that JSON has no form for becomes a string that can be read
back. Used for single-file .jsonl output, and where an output is shown."""

import base64
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from batchinfer.data.jsonl_schema import is_json_text

# Legal inside JSON strings, but many readers of lines break at them.
_LINE_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
_encode = json.JSONEncoder(ensure_ascii=False, separators=(", ", ": "), allow_nan=False).encode


def to_lines(table: pa.Table | pa.RecordBatch) -> Iterator[str]:
    """One JSON object a row, without the newline."""
    for row in to_rows(table):
        yield _encode(row).translate(_LINE_BREAKS)


def to_rows(table: pa.Table | pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The rows as JSON values. Timestamps, dates and times are ISO 8601, decimals strings, binary base64, NaN and
    infinity null, maps lists of pairs, durations ISO 8601 seconds; columns of JSON text become JSON again."""
    names = table.schema.names
    columns = [
        _json_text(column) if is_json_text(field) else values(column)
        for field, column in zip(table.schema, table.columns, strict=True)
    ]
    for row in zip(*columns, strict=True):
        yield dict(zip(names, row, strict=True))


def _json_text(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    return [None if text is None else _parse(text) for text in column.to_pylist()]


def _parse(text: str) -> Any:
    return json.loads(text, parse_constant=lambda _: None, parse_float=_finite)


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def values(array: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The values as what json.dumps takes."""
    if isinstance(array, pa.ChunkedArray):
        return [value for chunk in array.chunks for value in values(chunk)]
    if isinstance(array, pa.ExtensionArray):
        return values(array.storage)
    if types.is_dictionary(array.type):
        return values(array.dictionary_decode())
    if types.is_run_end_encoded(array.type):
        return values(pc.run_end_decode(array))
    for matches, convert in _CONVERTERS:
        if matches(array.type):
            return convert(array)
    return array.to_pylist()


def _floats(array: pa.Array) -> list[Any]:
    # float16 and float32 through their shortest text: 0.1 rather than 0.10000000149011612
    texts = array.to_pylist() if types.is_float64(array.type) else _short_floats(array)
    return [v if v is None or math.isfinite(v) else None for v in texts]


def _short_floats(array: pa.Array) -> list[float | None]:
    texts = array.cast(pa.float32()).cast(pa.string()).to_pylist()
    return [None if t is None else float(t) for t in texts]


def _texts(array: pa.Array) -> list[Any]:
    return array.cast(pa.string()).to_pylist()


def _decimals(array: pa.Array) -> list[Any]:
    return [None if v is None else format(v, "f") for v in array.to_pylist()]


def _timestamps(array: pa.Array) -> list[Any]:
    if array.type.tz is None:
        return pc.strftime(array, format="%Y-%m-%dT%H:%M:%S").to_pylist()
    texts = pc.strftime(array, format="%Y-%m-%dT%H:%M:%S%z").to_pylist()
    return [None if t is None else f"{t[:-2]}:{t[-2:]}" for t in texts]


def _durations(array: pa.Array) -> list[Any]:
    digits = {"s": 0, "ms": 3, "us": 6, "ns": 9}[array.type.unit]
    return [None if v is None else _duration(v, digits) for v in array.cast(pa.int64()).to_pylist()]


def _duration(value: int, digits: int) -> str:
    whole, fraction = divmod(abs(value), 10**digits)
    tail = f".{fraction:0{digits}d}" if digits else ""
    return f"{'-' if value < 0 else ''}PT{whole}{tail}S"


def _binaries(array: pa.Array) -> list[Any]:
    return [None if v is None else base64.b64encode(v).decode() for v in array.to_pylist()]


def _structs(array: pa.Array) -> list[Any]:
    names = [field.name for field in array.type]
    columns = [values(pc.struct_field(array, [i])) for i in range(len(names))]
    rows = zip(*columns, strict=True) if columns else iter([()] * len(array))
    valid = array.is_valid().to_pylist()
    return [dict(zip(names, row, strict=True)) if ok else None for row, ok in zip(rows, valid, strict=True)]


def _lists(array: pa.Array) -> list[Any]:
    flat = values(pc.list_flatten(array))
    return _cut(flat, pc.list_value_length(array).to_pylist())


def _maps(array: pa.Array) -> list[Any]:
    entry = pa.struct([pa.field("key", array.type.key_type), pa.field("value", array.type.item_type)])
    rows = _lists(array.cast(pa.list_(entry)))
    return [row if row is None else [[pair["key"], pair["value"]] for pair in row] for row in rows]


def _is_any_binary(kind: pa.DataType) -> bool:
    tests = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    return any(test(kind) for test in tests)


def _is_any_list(kind: pa.DataType) -> bool:
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(test(kind) for test in tests)


def _cut(flat: list[Any], lengths: list[int | None]) -> list[Any]:
    rows: list[Any] = []
    start = 0
    for length in lengths:
        rows.append(None if length is None else flat[start : start + length])
        start += length or 0
    return rows


_CONVERTERS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], list[Any]]], ...] = (
    (types.is_floating, _floats),
    (types.is_decimal, _decimals),
    (types.is_timestamp, _timestamps),
    (types.is_date, _texts),
    (types.is_time, _texts),
    (types.is_duration, _durations),
    (_is_any_binary, _binaries),
    (types.is_struct, _structs),
    (types.is_map, _maps),
    (_is_any_list, _lists),
)
