"""Texts of a file, to be scored or calibrated with: a column of Parquet or JSON Lines, or a plain text file whole. Used
by evaluation/ and conversion/."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from batchinfer.config import InputConfig
from batchinfer.data.columns import Unreadable, column_values, is_missing
from batchinfer.data.files import locate, read_option_file
from batchinfer.data.readers import iter_rows
from batchinfer.data.shards import Shard, discover
from batchinfer.errors import RowError, UsageError, first_line

_PLAIN = (".txt", ".md")


def iter_texts(
    option: str,
    path: str,
    column: str | None = None,
    default_columns: Sequence[str] = ("text", "prompt"),
    render: Callable[[Any], str] | None = None,
) -> Iterator[str]:
    """The texts of one file, directory or glob in its order; null ones are left out.

    option: the command-line option that names the file, for messages; with `-column` after it, the one that names its
    column. column: default the first of `default_columns` that is there. A .txt or .md file is one text. render: makes
    text of a value that is none, chat messages for one, and raises RowError, TypeError or ValueError where it cannot.
    Raises UsageError naming the file and what is wrong; where the file or the column is, before the first text.
    """
    if path.lower().endswith(_PLAIN):
        if column is not None:
            raise UsageError(f"{option} {path}: a plain text file has no column {column!r}")
        return iter([read_option_file(option, path)])
    if locate(path).is_file() and "." not in locate(path).name:
        raise UsageError(f"{option} {path}: the name must end in .parquet, .jsonl[.gz|.zst], .txt or .md")
    try:
        shards = discover(InputConfig(input=(path,))).shards
    except UsageError as error:
        raise UsageError(str(error).replace("--input", option)) from error
    return _values(shards, _text_column(option, path, shards, (column,) if column else default_columns), render)


def _text_column(option: str, path: str, shards: tuple[Shard, ...], wanted: Sequence[str]) -> str:
    names = [name for name in shards[0].schema.names if all(name in shard.schema.names for shard in shards)]
    found = next((name for name in wanted if name in names), None)
    if found is None:
        missing = " or ".join(repr(name) for name in wanted)
        raise UsageError(
            f"{option} {path}: there is no column {missing}; it has {', '.join(names)}: name one with {option}-column"
        )
    return found


def _values(shards: tuple[Shard, ...], column: str, render: Callable[[Any], str] | None) -> Iterator[str]:
    for shard in shards:
        for batch in iter_rows(shard, 0, None, [column]):
            for row, value in enumerate(column_values(batch.table, column) or [], batch.start):
                if not is_missing(value):
                    yield value if isinstance(value, str) else _rendered(value, render, shard.uri, column, row)


def _rendered(value: Any, render: Callable[[Any], str] | None, uri: str, column: str, row: int) -> str:
    if isinstance(value, Unreadable):
        raise UsageError(f"{uri}: column {column!r} cannot be read in row {row}: {value.reason}")
    if render is None:
        raise UsageError(f"{uri}: column {column!r} holds {type(value).__name__} in row {row}, not text")
    try:
        return render(value)
    except (RowError, TypeError, ValueError) as error:
        raise UsageError(
            f"{uri}: column {column!r} holds no chat messages in row {row}: {first_line(error)}"
        ) from error
