"""`batchinfer show`: prints finished rows for a person to read."""

import itertools
import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from batchinfer.errors import UsageError
from batchinfer.units import format_ms

if TYPE_CHECKING:
    from batchinfer.data.manifest import JobManifest
    from batchinfer.data.read_output import OutputRow
    from batchinfer.data.read_unfinished import UnfinishedOutput

_DEFAULT_LIMIT = 10
_MOST_CHARACTERS = 1000
_MOST_COLUMNS = 8  # that are named as not shown
_ID_COLUMNS = ("id", "custom_id")
_PROMPT_COLUMNS = ("prompt", "messages")
_LABEL_WIDTH = 12


@dataclass(slots=True)
class _Shown:
    """What is said after the rows."""

    num_rows: int = 0
    has_more: bool = False
    hidden_columns: dict[str, None] = field(default_factory=dict)  # in their order

    def note(self, of_which: str, has_range: bool) -> str | None:
        """None where nothing is left out."""
        if not self.num_rows:
            return f"no {of_which} to show"
        more = "--rows and --limit choose others" if has_range else "--limit N shows more, --rows 0,5-9 others"
        names = [" ".join(_printable(name).split()) for name in self.hidden_columns]
        listed = ", ".join(names[:_MOST_COLUMNS]) + (
            f" and {len(names) - _MOST_COLUMNS} more" * (len(names) > _MOST_COLUMNS)
        )
        parts = [
            f"not shown: further {of_which}s ({more})" if self.has_more else "",
            f"not shown: input column{'s' * (len(names) > 1)} {listed} (--columns A,B chooses)" if names else "",
        ]
        return "; ".join(filter(None, parts)) or None


@click.command(short_help="Print finished rows readably.")
@click.argument("output", metavar="OUTPUT")
@click.option("--rows", metavar="0,5-9", help="Output rows to show, counted from 0.  [default: the first ones]")
@click.option("--errors", is_flag=True, help="Only rows that failed.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N rows.  [default: 10 without --rows]")
@click.option("--columns", metavar="A,B", help="Input columns to show.  [default: the prompt's, else all]")
@click.option("--full", is_flag=True, help=f"Show long texts whole, not only {_MOST_CHARACTERS:,} characters.")
def show(output: str, rows: str | None, errors: bool, limit: int | None, columns: str | None, full: bool) -> None:
    """Print prompts, completions and times of OUTPUT: a job's directory, one of its parts, or a single .parquet or
    .jsonl[.gz|.zst] file. Of an unfinished job: the rows that are answered so far.

    Rows are those of the output, of which a row with n samples has n; where that is another row in its input file, the
    heading says which.
    """
    ranges = _parse_rows(rows) if rows is not None else [range(2**62)]
    if limit is None and rows is None:
        limit = _DEFAULT_LIMIT
    width = shutil.get_terminal_size((100, 24)).columns
    wanted = columns.split(",") if columns is not None else None
    most_characters = None if full else _MOST_CHARACTERS
    from batchinfer.data.read_output import iter_output  # here, as it brings pyarrow
    from batchinfer.data.read_unfinished import find_output

    manifest, unfinished = find_output(output)
    if unfinished is not None:
        click.echo(f"batchinfer: {_unfinished_note(output, unfinished)}", err=True)
    found = unfinished.rows(ranges, errors) if unfinished is not None else iter_output(output, ranges, errors)
    shown = _Shown()
    for row in _counted(found, limit, shown):
        columns_of_row = _shown_columns(row, wanted)
        if wanted is None:
            hidden = (name for name in row.inputs if name not in (*columns_of_row, *_ID_COLUMNS))
            shown.hidden_columns |= dict.fromkeys(hidden)
        click.echo(_render(row, _place(row, manifest), columns_of_row, width, most_characters))
    note = shown.note("failed row" if errors else "row", rows is not None)
    if note is not None:
        click.echo(f"batchinfer: {note}", err=True)


def _counted(rows: "Iterator[OutputRow]", limit: int | None, shown: _Shown) -> "Iterator[OutputRow]":
    for row in itertools.islice(rows, limit):
        shown.num_rows += 1
        yield row
    shown.has_more = next(rows, None) is not None


def _unfinished_note(output: str, unfinished: "UnfinishedOutput") -> str:
    done, total, changed = unfinished.num_done, unfinished.num_rows, unfinished.changed_files()
    state = f"{output}: the job is not finished: {done:,} of {total:,} rows are answered so far; "
    if changed:
        more = f" and {len(changed) - 1} more files" if len(changed) > 1 else ""
        return (
            f"{state}{changed[0]}{more} of its input can't be read as it was, so the columns of its rows are missing "
            "here, and a run carries on only once the file is as it was"
        )
    return f"{state}where no run is at work on it, the same `batchinfer run` command, without --overwrite, carries on"


def _place(row: "OutputRow", manifest: "JobManifest | None") -> str:
    """Where in the input the row was, where its number does not say it."""
    shard, number, sample = (int(part) for part in row.result["request_id"].split("-"))
    shards = manifest.shards if manifest is not None else ()
    place = ""
    if len(shards) > 1:
        place = f" · row {number} of {shards[shard].uri.rpartition('/')[2]}"
    elif shard:  # a part by itself does not name its files
        place = f" · row {number} of input file {shard + 1}"
    elif number != row.number:
        place = f" · row {number} of the input"
    return place + (f", sample {sample}" if sample and place else f" · sample {sample}" if sample else "")


def _parse_rows(text: str) -> list[range]:
    """Ranges of "5-9,0": rising, and joined where they overlap."""
    ranges = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = [first, last] if dash else [first]
        if not all(number.isdecimal() for number in numbers) or int(numbers[-1]) < int(first):
            raise UsageError(f"--rows {text!r}: write row numbers and ranges, as in 0,5-9")
        ranges.append(range(int(first), int(numbers[-1]) + 1))
    joined: list[range] = []
    for rows in sorted(ranges, key=lambda r: r.start):
        if joined and rows.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, rows.stop))
        else:
            joined.append(rows)
    return joined


def _render(row: "OutputRow", place: str, columns: Sequence[str], width: int, most_characters: int | None) -> str:
    """place: in the input. most_characters: of a text that is shown; None for all."""
    ids = [f"{name} {row.inputs[name]}" for name in _ID_COLUMNS if row.inputs.get(name) is not None]
    heading = " · ".join([f"row {row.number}{place}", *ids])
    lines = [f"── {_printable(heading)} ".ljust(width, "─")]
    for name in columns:
        lines += _field(name, _clipped(_text(row.inputs[name]), most_characters), width)
    if row.result["finish_reason"] == "error":
        lines += _field("error", f"{row.result['error_code']}: {row.result['error_message']}", width)
    else:
        lines += _field("completion", _clipped(row.result["completion"] or "", most_characters), width)
        lines += _field("", _figures(row.result), width)
    return "\n".join(lines) + "\n"


def _shown_columns(row: "OutputRow", columns: Sequence[str] | None) -> Sequence[str]:
    if columns is None:
        return [name for name in _PROMPT_COLUMNS if name in row.inputs] or list(row.inputs)
    for name in columns:
        if name not in row.inputs:
            if not row.inputs:
                raise UsageError(f"--columns {name}: the input file of row {row.number} can't be read as it was")
            raise UsageError(f"--columns {name}: the input had the columns {', '.join(row.inputs)}")
    return columns


def _clipped(text: str, most_characters: int | None) -> str:
    if most_characters is None or len(text) <= most_characters:
        return text
    return f"{text[:most_characters]}… ({len(text) - most_characters:,} more characters; --full shows all)"


def _text(value: Any) -> str:
    """Chat messages as "role: content" lines; text as it is; other values as JSON."""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    ):
        return "\n".join(f"{message['role']}: {_text(message['content'])}" for message in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


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
