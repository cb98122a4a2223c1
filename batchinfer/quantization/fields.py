"""Typed access to a checkpoint's quantisation config, which has no schema: each producer writes its own keys. Used by
the format readers.

Keys that nobody asks for are left alone: most say how the weights were found, which changes nothing about how they are
read. The few that would are refused by the readers by name.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from batchinfer.errors import BatchInferError


class QuantizationFields:
    """The fields of one quantisation config. where: the file, and the field in it, for messages."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config = config
        self.where = where

    def raw(self, *names: str, default: Any = None) -> Any:
        """The value of the first of `names` that is there and not null: producers differ in their spelling."""
        return next((self._config[name] for name in names if self._config.get(name) is not None), default)

    def integer(self, *names: str, default: int | None = None) -> int:
        value = self.raw(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(names[0], value, "must be an integer")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = self.raw(name, default=default)
        if not isinstance(value, bool):
            raise self.error(name, value, "must be true or false")
        return value

    def text(self, *names: str, default: str = "") -> str:
        value = self.raw(*names, default=default)
        if not isinstance(value, str):
            raise self.error(names[0], value, "must be text")
        return value

    def choice(self, value: Any, name: str, allowed: Sequence[Any]) -> Any:
        """`value`, which is of field `name`. Raises BatchInferError unless it is among `allowed`."""
        if value not in allowed:
            raise self.error(name, value, f"is not read; must be one of {', '.join(str(one) for one in allowed)}")
        return value

    def texts(self, *names: str) -> tuple[str, ...]:
        """A list of text, empty where there is none."""
        value = self.raw(*names, default=[])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(names[0], value, "must be a list of text")
        return tuple(value)

    def mapping(self, name: str) -> "QuantizationFields":
        """An object in the field, empty where there is none."""
        value = self.raw(name, default={})
        if not isinstance(value, Mapping):
            raise self.error(name, value, "must be an object")
        return QuantizationFields(value, f"{self.where}.{name}")

    def items(self) -> list[tuple[str, Any]]:
        return list(self._config.items())

    def pattern(self, text: str) -> re.Pattern[str]:
        """A regular expression that stands in this config."""
        try:
            return re.compile(text)
        except re.error as error:
            raise BatchInferError(f"{self.where}: {text!r} is not a regular expression: {error}") from error

    def refuse(self, name: str, *harmless: Any) -> None:
        """Raises BatchInferError where the field holds what would change the weights' meaning."""
        value = self.raw(name)
        if value not in (None, False, "", *harmless) and value != {} and value != []:
            raise self.error(name, value, "changes what the weights mean in a way that is not supported")

    def error(self, name: str, value: Any, problem: str) -> BatchInferError:
        return BatchInferError(f"{self.where}: {name} = {value!r} {problem}")
