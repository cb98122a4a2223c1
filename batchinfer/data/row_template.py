"""The --template option: a Jinja template over a row's columns, compiled once and run in a sandbox. Used by
prompt_source.py."""

from collections.abc import Collection, Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchinfer.data.columns import is_missing
from batchinfer.data.files import read_option_file
from batchinfer.errors import ErrorCode, RowError, UsageError


class RowTemplate:
    """Makes a row's prompt text. `columns` are those that the template names.

    text: the template, or @FILE. available: the columns there are; a name that is none of them is a UsageError, as is
    a template that does not compile.
    """

    def __init__(self, text: str, available: Collection[str]) -> None:
        self._environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, finalize=_refuse_missing)
        source = read_option_file("--template", text[1:]) if text.startswith("@") else text
        try:
            names = meta.find_undeclared_variables(self._environment.parse(source))
            self._template = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise UsageError(f"--template: {error.message} (line {error.lineno})") from error
        unknown = sorted(names - set(available) - set(self._environment.globals))
        if unknown:
            raise UsageError(f"--template names {_quoted(unknown)}, but the columns are {_quoted(available)}")
        self.columns = tuple(name for name in available if name in names)

    def render(self, row: Mapping[str, Any]) -> str:
        """The row's prompt text. Raises RowError: NULL_PROMPT where a null would be written, else TEMPLATE_ERROR."""
        try:
            return self._template.render(row)
        except RowError:
            raise
        except Exception as error:  # whatever the template's own code raises
            raise RowError(ErrorCode.TEMPLATE_ERROR, f"--template: {type(error).__name__}: {error}") from error


def _refuse_missing(value: Any) -> Any:
    """Runs on each value that the template writes: a prompt never holds the text "None" or "nan" for a null."""
    if is_missing(value):
        raise RowError(ErrorCode.NULL_PROMPT, "--template writes a value that is null in this row")
    return value


def _quoted(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
