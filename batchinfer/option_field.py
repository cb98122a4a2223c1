"""How an option of a job is declared: a dataclass field whose metadata the command line and job files are made from."""

from dataclasses import field
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    kind: str = "value",
    metavar: str = "",
    affects_answers: bool = False,
    unset: str = "none",
) -> Any:
    """A field that is also a command-line option.

    kind: value | flag (--x/--no-x) | many (repeatable) | size (bytes, "24MiB") | duration (seconds, "90m") | json.
    unset: what None or no value means, in words.
    affects_answers: the value belongs to the fingerprint that a resumed job must keep (answers or file layout).
    """
    metadata = {
        "help": help,
        "choices": choices,
        "kind": kind,
        "metavar": metavar,
        "affects_answers": affects_answers,
        "unset": unset,
    }
    if isinstance(default, list | dict):
        raise TypeError("option defaults are immutable")
    return field(default=default, metadata=metadata)


def require(holds: bool, name: str, value: object, allowed: str) -> None:
    """Raises ValueError naming the field and what is allowed unless the rule holds."""
    if not holds:
        raise ValueError(f"{name} = {value!r}: must be {allowed}")


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    require(value in choices, name, value, "one of " + ", ".join(choices))
