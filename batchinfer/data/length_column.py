"""The column that tells rows with answers of unlike lengths apart (--length-class-column). Checked by job_input.py,
read by prompts.py."""

import sys
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from batchinfer.data.columns import Unreadable, column_values, is_missing
from batchinfer.data.readers import iter_rows
from batchinfer.data.shards import ShardSet
from batchinfer.errors import UsageError
from batchinfer.request import MAX_LENGTH_GROUPS, NO_VALUE

_MOST_CHARACTERS = 64  # of a value that count
_FIRST_ROWS = 1000  # of the input, on whose values a word is said


def require_length_column(column: str, schemas: Sequence[pa.Schema]) -> None:
    """Raises UsageError where no shard has the column."""
    names = list(dict.fromkeys(name for schema in schemas for name in schema.names))
    if column not in names:
        listed = ", ".join(f"`{name}`" for name in names)
        raise UsageError(f"--length-class-column {column}: there is no such column; the columns are {listed}")


def length_groups(batch: pa.RecordBatch, column: str) -> list[str]:
    """The first characters of each row's value in words; NO_VALUE where it is null or cannot be read, or the batch has
    no such column."""
    values = column_values(batch, column) or [None] * batch.num_rows
    return [_group(value) for value in values]


def _group(value: Any) -> str:
    has_none = is_missing(value) or isinstance(value, Unreadable)
    return NO_VALUE if has_none else sys.intern(str(value)[:_MOST_CHARACTERS])


def describe_groups(column: str, shard_set: ShardSet, limit: int | None) -> str:
    """One line for the log: how many values the first rows have, and what follows from too many. limit: of the job's
    rows, where there is one."""
    groups = _first_groups(column, shard_set, min(_FIRST_ROWS, limit or _FIRST_ROWS))
    count = len(set(groups) - {NO_VALUE})
    rows = "row" if len(groups) == 1 else f"{len(groups):,} rows"
    line = f"{count:,} value{'' if count == 1 else 's'} in the first {rows}"
    if count > MAX_LENGTH_GROUPS:
        return (
            f"warning: --length-class-column: `{column}` has {line}; lengths are learnt for each of the first "
            f"{MAX_LENGTH_GROUPS} and for all others together, so a column of fewer values tells more"
        )
    return f"answer lengths: learnt for each value of `{column}`, {line}"


def _first_groups(column: str, shard_set: ShardSet, num_rows: int) -> list[str]:
    groups: list[str] = []
    for shard in shard_set.shards:
        count = min(shard.num_rows, num_rows - len(groups))
        if column not in shard.schema.names:
            groups += [NO_VALUE] * count
        elif count:
            batches = iter_rows(shard, 0, count, [column], _FIRST_ROWS)
            groups += [group for batch in batches for group in length_groups(batch.table, column)]
    return groups
