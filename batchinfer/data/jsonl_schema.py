"""One schema for all JSON Lines shards of an input: what kinds of values each column holds, resolved after a full scan,
and the conversion of parsed rows to it. A type guessed from the first rows would fail on a later one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa

from batchinfer.data.jsonl import INDEX_STRIDE, LineError, LineIndex, error_message, iter_lines, json_text, parse_line

JSON_METADATA = {b"batchinfer": b"json"}  # marks a string column whose values are JSON text
_EXACT = 2**53  # integers up to here are float64 values
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class _InexactInt:
    """Kind of an int64 that float64 cannot hold."""


class _BigInt:
    """Kind of an integer beyond int64."""


class ColumnKinds:
    """The columns of the rows seen so far, in order of appearance, with the kinds of their values."""

    def __init__(self) -> None:
        self._kinds: dict[str, set[type]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        kinds = self._kinds
        for name, value in row.items():
            kind = type(value)
            if kind is int and not -_EXACT <= value <= _EXACT:
                kind = _kind_of_large_int(value)
            try:
                kinds[name].add(kind)
            except KeyError:
                kinds[name] = {kind}

    def schema(self) -> pa.Schema:
        """bool, int64, float64 and string where all values agree (an all-null column is a string); float64 too where
        floats meet integers that float64 holds exactly. Everything else is a string of JSON text, marked by
        JSON_METADATA."""
        return pa.schema([_field(name, kinds) for name, kinds in self._kinds.items()])


def _kind_of_large_int(value: int) -> type:
    if not _INT64_MIN <= value <= _INT64_MAX:
        return _BigInt
    return int if int(float(value)) == value else _InexactInt


def _field(name: str, seen: set[type]) -> pa.Field:
    kinds = seen - {type(None)}
    if kinds <= {str}:
        return pa.field(name, pa.string())
    if kinds == {bool}:
        return pa.field(name, pa.bool_())
    if kinds <= {int, _InexactInt}:
        return pa.field(name, pa.int64())
    if kinds <= {int, float}:
        return pa.field(name, pa.float64())
    return pa.field(name, pa.string(), metadata=JSON_METADATA)


def is_json_text(field: pa.Field) -> bool:
    """The column holds JSON text of nested or mixed values rather than plain strings."""
    return bool(field.metadata) and field.metadata.get(b"batchinfer") == b"json"


def scan_lines(stream: IO[bytes], kinds: ColumnKinds) -> tuple[int, LineIndex, str | None]:
    """Reads a whole shard once, adding to `kinds`. Memory stays flat.

    Gives (number of rows, index, message of the first unreadable line).
    """
    num_rows, first_error = 0, None
    offsets: list[int] = []
    numbers: list[int] = []
    for line in iter_lines(stream):
        if num_rows % INDEX_STRIDE == 0:
            offsets.append(line.offset)
            numbers.append(line.number)
        num_rows += 1
        try:
            kinds.add(parse_line(line.data))
        except LineError as error:
            first_error = first_error or error_message(line.number, error)
    return num_rows, LineIndex(np.array(offsets, np.int64), np.array(numbers, np.int64)), first_error


def rows_to_batch(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    """Parsed rows in the resolved schema; a name that a row lacks is null, as is each value of an empty row.

    Raises pyarrow.ArrowInvalid or TypeError where a value does not fit: then the file is not the one that was scanned.
    """
    columns = [_to_array((row.get(field.name) for row in rows), field) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _to_array(values: Iterable[Any], field: pa.Field) -> pa.Array:
    convert: Callable[[Any], Any] | None = None
    if is_json_text(field):
        convert = json_text
    elif pa.types.is_float64(field.type):
        convert = _to_float  # pyarrow refuses integers above 2**53 even where they are exact
    return pa.array(list(map(convert, values)) if convert else list(values), type=field.type)


def _to_float(value: Any) -> float | None:
    return None if value is None else float(value)
