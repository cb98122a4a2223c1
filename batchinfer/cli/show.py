"""`batchinfer show`: prints finished rows for a person to read."""

import itertools
import json
import shutil
import textwrap
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import click

from batchinfer.errors import UsageError
from batchinfer.units import format_ms

_BATCH_ROWS = 1024
_DEFAULT_LIMIT = 10
_ID_COLUMNS = ("id", "custom_id")
_PROMPT_COLUMNS = ("prompt", "messages")
_LABEL_WIDTH = 12


@click.command(short_help="Print finished rows readably.")
@click.argument("output", metavar="OUTPUT")
@click.option("--rows", metavar="0,5-9", help="Output rows to show, counted from 0.  [default: the first ones]")
@click.option("--errors", is_flag=True, help="Only rows that failed.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N rows.  [default: 10 without --rows]")
@click.option("--columns", metavar="A,B", help="Input columns to show.  [default: the prompt's, else all]")
def show(output: str, rows: str | None, errors: bool, limit: int | None, columns: str | None) -> None:
    """Print prompts, completions and times of OUTPUT: a job's directory, one of its parts, or a single .parquet or
    .jsonl file."""
    ranges = _parse_rows(rows) if rows is not None else [range(0, 2**62)]
    if limit is None and rows is None:
        limit = _DEFAULT_LIMIT
    width = shutil.get_terminal_size((100, 24)).columns
    wanted = columns.split(",") if columns is not None else None
    for row in itertools.islice(_select(output, ranges, errors), limit):
        click.echo(_render(row, wanted, width))


class Row(NamedTuple):
    """An output row: its input columns, and the columns of its result without the job's --output-prefix."""

    number: int
    inputs: dict[str, Any]
    result: dict[str, Any]


def _parse_rows(text: str) -> list[range]:
    """Ranges of "0,5-9"."""
    ranges = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = [first, last] if dash else [first]
        if not all(number.isdecimal() for number in numbers) or int(numbers[-1]) < int(first):
            raise UsageError(f"--rows {text!r}: write row numbers and ranges, as in 0,5-9")
        ranges.append(range(int(first), int(numbers[-1]) + 1))
    return ranges


def _select(output: str, ranges: Sequence[range], errors: bool) -> Iterator[Row]:
    end = max(r.stop for r in ranges)
    for number, columns in _iter_output(output, ranges):
        if number >= end:
            return
        row = _split_row(number, columns, output)
        if any(number in r for r in ranges) and not (errors and row.result["finish_reason"] != "error"):
            yield row


def _iter_output(output: str, ranges: Sequence[range]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, columns) of the output's rows in order; batches without a wanted row are skipped unread."""
    import fsspec

    filesystem, path = fsspec.core.url_to_fs(output)
    if not filesystem.exists(path):
        raise UsageError(f"{output}: there is no such file or directory")
    paths = [path]
    if filesystem.isdir(path):
        paths = sorted(filesystem.glob(path.rstrip("/") + "/part-*.parquet"))
        if not paths:
            raise UsageError(f"{output}: no finished part there yet")
    first = 0
    for part in paths:
        reader = _iter_jsonl if part.endswith(".jsonl") else _iter_parquet
        with filesystem.open(part, "rb") as file:
            first = yield from reader(file, first, ranges, part)


def _iter_parquet(
    file: Any, first: int, ranges: Sequence[range], path: str
) -> Generator[tuple[int, dict[str, Any]], None, int]:
    import pyarrow
    from pyarrow import parquet

    try:
        reader = parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise UsageError(f"{path}: not a Parquet file ({error})") from error
    for group in range(reader.num_row_groups):
        count = reader.metadata.row_group(group).num_rows
        if _overlaps(range(first, first + count), ranges):
            yield from _iter_row_group(reader, group, first)
        first += count
    return first


def _iter_row_group(reader: Any, group: int, first: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for batch in reader.iter_batches(_BATCH_ROWS, row_groups=[group]):
        for offset in range(batch.num_rows):
            yield first + offset, batch.slice(offset, 1).to_pylist()[0]
        first += batch.num_rows


def _iter_jsonl(
    file: Any, first: int, ranges: Sequence[range], path: str
) -> Generator[tuple[int, dict[str, Any]], None, int]:
    for number, line in enumerate(file, first):
        if _overlaps(range(number, number + 1), ranges):
            try:
                columns = json.loads(line)
            except ValueError as error:
                raise UsageError(f"{path}: line {number + 1} is not JSON ({error})") from error
            yield number, columns if isinstance(columns, dict) else {}
        first = number + 1
    return first


def _overlaps(rows: range, ranges: Sequence[range]) -> bool:
    return any(max(rows.start, r.start) < min(rows.stop, r.stop) for r in ranges)


def _split_row(number: int, columns: dict[str, Any], output: str) -> Row:
    from batchinfer.data.result_schema import result_schema

    prefixes = [name.removesuffix("finish_reason") for name in columns if name.endswith("finish_reason")]
    prefix = next((p for p in prefixes if {p + "completion", p + "request_id"} <= columns.keys()), None)
    if prefix is None:
        raise UsageError(f"{output}: not an output of batchinfer, as it has no columns completion and finish_reason")
    names = {
        n: n.removeprefix(prefix)
        for n in result_schema(prefix, token_ids=True, logprobs=True, prompt_logprobs=True).names
        if n in columns
    }
    inputs = {name: value for name, value in columns.items() if name not in names}
    return Row(number, inputs, {short: columns[name] for name, short in names.items()})


def _render(row: Row, columns: Sequence[str] | None, width: int) -> str:
    ids = [f"{name} {row.inputs[name]}" for name in _ID_COLUMNS if row.inputs.get(name) is not None]
    if row.result["sample_index"]:
        ids.append(f"sample {row.result['sample_index']}")
    heading = " · ".join([f"row {row.number}", *ids])
    lines = [f"── {_printable(heading)} ".ljust(width, "─")]
    for name in _shown_columns(row, columns):
        lines += _field(name, _text(row.inputs[name]), width)
    if row.result["finish_reason"] == "error":
        lines += _field("error", f"{row.result['error_code']}: {row.result['error_message']}", width)
    else:
        lines += _field("completion", row.result["completion"] or "", width)
        lines += _field("", _figures(row.result), width)
    return "\n".join(lines) + "\n"


def _shown_columns(row: Row, columns: Sequence[str] | None) -> Sequence[str]:
    if columns is None:
        return [name for name in _PROMPT_COLUMNS if name in row.inputs] or list(row.inputs)
    for name in columns:
        if name not in row.inputs:
            raise UsageError(f"--columns {name}: the input had the columns {', '.join(row.inputs)}")
    return columns


def _text(value: Any) -> str:
    """Chat messages as "role: content" lines; text as it is; other values as JSON."""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    ):
        return "\n".join(f"{message['role']}: {_text(message['content'])}" for message in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _figures(result: dict[str, Any]) -> str:
    stop = result["finish_reason"] + (f" at {result['stop_reason']!r}" if result["stop_reason"] else "")
    parts = [
        f"{result['completion_tokens']} tokens ({stop})",
        f"prompt {result['prompt_tokens']} ({result['cached_prompt_tokens']} cached)",
        f"TTFT {format_ms(result['ttft_ms'])}",
        f"TBT {format_ms(result['tbt_mean_ms'])}, p99 {format_ms(result['tbt_p99_ms'])}",
        f"latency {format_ms(result['latency_ms'])}",
    ]
    if result["num_preemptions"]:
        parts.append(f"preempted {result['num_preemptions']} times")
    return " · ".join(parts)


def _field(label: str, text: str, width: int) -> list[str]:
    """The text wrapped beside its label, its own line breaks kept."""
    room = max(width - _LABEL_WIDTH, 20)
    wrapped = [
        piece
        for line in _printable(text).split("\n")
        for piece in textwrap.wrap(line, room, replace_whitespace=False, drop_whitespace=False) or [""]
    ]
    labels = itertools.chain([label[: _LABEL_WIDTH - 1]], itertools.repeat(""))
    return [f"{name:<{_LABEL_WIDTH}}{piece}".rstrip() for name, piece in zip(labels, wrapped, strict=False)]


def _printable(text: str) -> str:
    """Without control characters, so that a completion cannot drive the terminal."""
    return "".join(
        c if c.isprintable() or c == "\n" else " " if c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
