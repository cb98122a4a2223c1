"""Texts of a file, to be scored or calibrated with: a column of Parquet or JSON Lines, or a plain text file whole. Used
by evaluation/."""

from collections.abc import Iterator

from batchinfer.config import InputConfig
from batchinfer.data.columns import column_values, is_missing
from batchinfer.data.files import locate, read_option_file
from batchinfer.data.readers import iter_rows
from batchinfer.data.shards import Shard, discover
from batchinfer.errors import UsageError

_PLAIN = (".txt", ".md")
_DEFAULT_COLUMNS = ("text", "prompt")


def iter_texts(option: str, path: str, column: str | None = None) -> Iterator[str]:
    """The texts of one file, directory or glob in its order; null ones are left out.

    option: the command-line option that names the file, for messages. column: default the one named text or prompt.
    A .txt or .md file is one text. Raises UsageError, before the first text, naming the file and what is wrong.
    """
    if path.lower().endswith(_PLAIN):
        if column is not None:
            raise UsageError(f"{option} {path}: a plain text file has no column {column!r}")
        return iter([read_option_file(option, path)])
    if locate(path).is_file() and "." not in locate(path).name:
        raise UsageError(f"{option} {path}: the name must end in .parquet, .jsonl[.gz|.zst], .txt or .md")
    shards = discover(InputConfig(input=(path,))).shards
    return _values(shards, _text_column(option, path, shards, column))


def _text_column(option: str, path: str, shards: tuple[Shard, ...], column: str | None) -> str:
    names = [name for name in shards[0].schema.names if all(name in shard.schema.names for shard in shards)]
    wanted = _DEFAULT_COLUMNS if column is None else (column,)
    found = next((name for name in wanted if name in names), None)
    if found is None:
        missing = " or ".join(repr(name) for name in wanted)
        raise UsageError(f"{option} {path}: there is no column {missing}; it has {', '.join(names)}")
    return found


def _values(shards: tuple[Shard, ...], column: str) -> Iterator[str]:
    for shard in shards:
        for batch in iter_rows(shard, 0, None, [column]):
            for row, value in enumerate(column_values(batch.table, column) or [], batch.start):
                if is_missing(value):
                    continue
                if not isinstance(value, str):
                    kind = type(value).__name__
                    raise UsageError(f"{shard.uri}: column {column!r} holds {kind} in row {row}, not text")
                yield value
