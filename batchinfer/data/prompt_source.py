"""Where in a row the prompt is: chosen by the options or detected in the schema, and said. Used by prompts.py."""

from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from batchinfer.config import InputConfig
from batchinfer.data.columns import Unreadable, column_values
from batchinfer.data.row_template import RowTemplate
from batchinfer.errors import ErrorCode, RowError, UsageError

SourceKind = Literal["prompt", "messages", "prompt_token_ids", "template"]
_OPTIONS: dict[SourceKind, str] = {
    "prompt": "--prompt-column",
    "messages": "--messages-column",
    "prompt_token_ids": "--prompt-token-ids-column",
    "template": "--template",
}
_MEANINGS: dict[SourceKind, str] = {
    "prompt": "raw text",
    "messages": "chat messages",
    "prompt_token_ids": "token ids",
    "template": "template",
}
_DETECTED: tuple[SourceKind, ...] = ("prompt", "messages", "prompt_token_ids")  # as column names


@dataclass(frozen=True, slots=True)
class PromptSource:
    """kind says what the values are; columns are those that must be read."""

    kind: SourceKind
    columns: tuple[str, ...]
    template: RowTemplate | None = None
    is_detected: bool = False

    @property
    def column(self) -> str | None:
        """The one column that holds the prompt; None for a template."""
        return None if self.template else self.columns[0]

    def describe(self) -> str:
        """One line for the log."""
        names = ", ".join(f"`{name}`" for name in self.columns) or "no column"
        if self.template:
            return f"prompts: the template over {names} (--template)"
        how = f"detected; {_OPTIONS[self.kind]} and others choose" if self.is_detected else _OPTIONS[self.kind]
        return f"prompts: {_MEANINGS[self.kind]} in column {names} ({how})"

    def values(self, batch: pa.RecordBatch) -> list[Any]:
        """One value a row: the column's (None where the batch has no such column), or for a template the row's
        columns by name. A RowError where one of them cannot be read."""
        columns = {name: column_values(batch, name) for name in self.columns}
        present = {name: values for name, values in columns.items() if values is not None}
        rows = [{name: values[row] for name, values in present.items()} for row in range(batch.num_rows)]
        return [_unreadable(row) or (row if self.template else row.get(self.columns[0])) for row in rows]


def _unreadable(row: dict[str, Any]) -> RowError | None:
    for name, value in row.items():
        if isinstance(value, Unreadable):
            return RowError(ErrorCode.BAD_PROMPT, f"column `{name}` cannot be read: {value.reason}")
    return None


def choose_source(config: InputConfig, *schemas: pa.Schema) -> PromptSource:
    """The source that the options name, else the one column named prompt, messages or prompt_token_ids.

    schemas: of all shards; only columns that every shard has count. Raises UsageError where there is none, more than
    one, or a named column is not there.
    """
    columns = [name for name in schemas[0].names if all(name in schema.names for schema in schemas)]
    if config.template is not None:
        template = RowTemplate(config.template, columns)
        return PromptSource("template", template.columns, template)
    named: dict[SourceKind, str | None] = {
        "prompt": config.prompt_column,
        "messages": config.messages_column,
        "prompt_token_ids": config.prompt_token_ids_column,
    }
    for kind, column in named.items():
        if column is not None:
            return PromptSource(kind, (_require_column(column, columns, _OPTIONS[kind]),))
    return _detect(columns)


def _require_column(column: str, columns: list[str], option: str) -> str:
    if column not in columns:
        raise UsageError(f"{option} {column}: no such column in every shard; the columns are {_listed(columns)}")
    return column


def _detect(columns: list[str]) -> PromptSource:
    found = [kind for kind in _DETECTED if kind in columns]
    if len(found) == 1:
        return PromptSource(found[0], (found[0],), is_detected=True)
    if found:
        options = " or ".join(f"{_OPTIONS[kind]} {kind}" for kind in found)
        raise UsageError(f"columns {_listed(found)} could all be the prompt; choose with {options}")
    raise UsageError(
        f"no column named prompt, messages or prompt_token_ids; the columns are {_listed(columns)}; choose one with "
        "--prompt-column, --messages-column or --prompt-token-ids-column, or write --template"
    )


def _listed(names: "list[str] | list[SourceKind]") -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
