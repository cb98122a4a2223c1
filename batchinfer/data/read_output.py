"""Reads an output back in its row order, results apart from input columns. Used by `batchinfer show`, and a column at a
time by report/."""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.data.files import Location, locate, naming_faults
from batchinfer.data.json_lines import to_rows
from batchinfer.data.jsonl import LineError, error_message, iter_lines, open_lines, parse_line
from batchinfer.data.output_layout import PART_NAME
from batchinfer.data.parquet_input import inspect_parquet, iter_parquet
from batchinfer.data.result_schema import result_schema
from batchinfer.errors import UsageError

_BATCH_ROWS = 64  # become Python values together, though the reader may want but a few
_COLUMN_BATCH_ROWS = 16384
_JSONL_BATCH_ROWS = 1024
ID_COLUMNS = ("id", "custom_id")  # of the input, of which one names a row to its owner
_JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_ADVICE = "it may be cut short or of another format"


class OutputRow(NamedTuple):
    """A row as JSON values: its input columns, and its result without the job's --output-prefix.

    number: of the output row, counted from 0 over all parts. Of an unfinished job: among the answers so far.
    """

    number: int
    inputs: dict[str, Any]
    result: dict[str, Any]


def iter_output(target: str, rows: Sequence[range], only_errors: bool = False) -> Iterator[OutputRow]:
    """The rows of an output directory (of the parts that it holds so far), of one part or of a single file.

    rows: which output rows, as rising ranges that do not overlap; of Parquet no other row group is decoded.
    Raises UsageError naming the file where there is nothing to read, or something else than an output.
    """
    first = 0
    for location in _files(target):
        with naming_faults(location.uri, UsageError, _ADVICE):
            if location.name.endswith(_JSONL):
                yield from _read_jsonl(location, rows, only_errors)
                return
            schema, num_rows = inspect_parquet(location)
            columns = ResultColumns(schema.names, location.uri)
            for row_range in _within(rows, first, first + num_rows):
                yield from _read_parquet(location, schema, columns, first, row_range, only_errors)
            first += num_rows


def iter_results(target: str, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The chosen columns of the results of a whole output, named without the job's --output-prefix, and `input_id`, the
    value of the first of ID_COLUMNS that the input has: as it is in Parquet, as text from JSON Lines, else null.

    Of Parquet no other column is decoded. Raises UsageError as iter_output does.
    """
    for location in _files(target):
        with naming_faults(location.uri, UsageError, _ADVICE):
            if location.name.endswith(_JSONL):
                yield from _jsonl_results(location, names)
                return
            yield from _parquet_results(location, names)


def check_parts(target: str) -> None:
    """Raises UsageError where an output lacks a part before its last, as an interrupted one may: counting does not
    give the places of its rows in the job."""
    names = [location.name for location in _files(target)]
    numbers = [int(match[1]) for name in names if (match := PART_NAME.fullmatch(name))]
    missing = sorted(set(range(len(numbers))) - set(numbers))
    if missing:
        raise UsageError(f"{target}: part {missing[0]} is not there yet; finish that run first, by the same command")


def _files(target: str) -> list[Location]:
    location = locate(target)
    with naming_faults(location.uri, UsageError, "check the rights to it"):
        if location.is_file():
            return [location]
        if not location.is_directory():
            raise UsageError(f"{target}: there is no such file or directory")
        parts = [child for child in location.children() if PART_NAME.fullmatch(child.name)]
    if not parts:
        raise UsageError(f"{target}: no finished part there yet")
    return sorted(parts, key=lambda part: (len(part.name), part.name))  # part-100000 comes after part-99999


class ResultColumns:
    """Which columns of an output hold the result. Raises UsageError where it has none."""

    def __init__(self, names: Sequence[str], where: str) -> None:
        prefixes = [name.removesuffix("request_id") for name in names if name.endswith("request_id")]
        found = [prefix for prefix in prefixes if set(result_schema(prefix).names) <= set(names)]
        if not found:
            raise UsageError(f"{where}: not an output of batchinfer, as it lacks columns of results")
        self.names = list(names)
        self.prefix = found[-1]  # an earlier one is of the output that was this job's input
        appended = set(names[self.names.index(f"{self.prefix}request_id") :])
        known = result_schema(self.prefix, token_ids=True, logprobs=True, prompt_logprobs=True).names
        self._short_names = {name: name.removeprefix(self.prefix) for name in known if name in appended}

    def row(self, number: int, values: dict[str, Any]) -> OutputRow:
        inputs = {name: value for name, value in values.items() if name not in self._short_names}
        return OutputRow(number, inputs, {short: values[name] for name, short in self._short_names.items()})

    def results(self, names: Sequence[str]) -> dict[str, str]:
        """Columns of the file, with what iter_results calls them."""
        own_id = next((name for name in ID_COLUMNS if name in self.names and name not in self._short_names), None)
        ids = {} if own_id is None else {own_id: "input_id"}
        return ids | {self.prefix + name: name for name in names}


def _parquet_results(location: Location, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    schema, num_rows = inspect_parquet(location)
    columns = ResultColumns(schema.names, location.uri).results(names)
    wanted = pa.schema([schema.field(name) for name in columns])
    for _, batch in iter_parquet(location.uri, wanted, 0, num_rows, _COLUMN_BATCH_ROWS):
        renamed = batch.rename_columns(list(columns.values()))
        if "input_id" not in columns.values():
            renamed = renamed.append_column("input_id", pa.nulls(batch.num_rows))
        yield renamed


def _jsonl_results(location: Location, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    schema = pa.schema([result_schema().field(name) for name in names] + [pa.field("input_id", pa.string())])
    rows = _read_jsonl(location, [range(2**62)], only_errors=False)
    while chunk := list(itertools.islice(rows, _JSONL_BATCH_ROWS)):
        values = [{**{name: row.result[name] for name in names}, "input_id": _own_id(row.inputs)} for row in chunk]
        yield pa.RecordBatch.from_pylist(values, schema)


def _own_id(inputs: dict[str, Any]) -> str | None:
    value = next((inputs[name] for name in ID_COLUMNS if inputs.get(name) is not None), None)
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _within(rows: Sequence[range], start: int, stop: int) -> Iterator[range]:
    """What the ranges share with rows [start, stop)."""
    for part in rows:
        shared = range(max(part.start, start), min(part.stop, stop))
        if shared:
            yield shared


def _read_parquet(
    location: Location, schema: pa.Schema, columns: ResultColumns, first: int, rows: range, only_errors: bool
) -> Iterator[OutputRow]:
    """first: number of the file's first row."""
    batches = iter_parquet(location.uri, schema, rows.start - first, rows.stop - first, _BATCH_ROWS)
    for start, batch in batches:
        numbers = pa.array(range(first + start, first + start + batch.num_rows))
        if only_errors:
            failed = pc.equal(batch[f"{columns.prefix}finish_reason"], "error")
            numbers, batch = numbers.filter(failed), batch.filter(failed)
        for number, values in zip(numbers.to_pylist(), to_rows(batch), strict=True):
            yield columns.row(number, values)


def _read_jsonl(location: Location, rows: Sequence[range], only_errors: bool) -> Iterator[OutputRow]:
    columns: ResultColumns | None = None
    with location.open() as raw, open_lines(raw, location.name) as stream:
        for number, line in enumerate(iter_lines(stream)):
            if number >= rows[-1].stop:
                return
            if not any(number in part for part in rows):
                continue
            try:
                values = parse_line(line.data)
            except LineError as error:
                raise UsageError(f"{location.uri}: {error_message(line.number, error)}") from error
            if columns is None or columns.names != list(values):
                columns = ResultColumns(list(values), location.uri)
            row = columns.row(number, values)
            if not only_errors or row.result["finish_reason"] == "error":
                yield row
