"""Job files: TOML that holds any of run's options, with `{key}` in its text filled by --set. Read by cli/."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import Field
from pathlib import Path
from typing import Any

from batchinfer.config import iter_options
from batchinfer.errors import UsageError
from batchinfer.options import coerce, did_you_mean

# One brace each side: `{{ column }}` and `{% if %}` of Jinja templates and JSON objects stay as they are.
_PLACEHOLDER = re.compile(r"(?<!\{)\{([A-Za-z_][A-Za-z0-9_-]*)\}(?!\})")


def read_job_file(path: Path, settings: Mapping[str, str]) -> dict[str, Any]:
    """{option name: value of the option's type}. Relative paths in it are relative to the working directory.

    Raises UsageError for a file that cannot be read, an unknown option, a value of the wrong type, a `{key}` without
    a setting and a setting without a `{key}`.
    """
    table = _fill_settings(_load(path), settings, path)
    members = {member.name: member for _, member in iter_options()}
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in members:
            advice = did_you_mean(name, members) or "`batchinfer run --help` lists them"
            raise UsageError(f"{path}: unknown option {key!r}; {advice}")
        if name in values:
            raise UsageError(f"{path}: {key!r} stands there twice, with - and with _")
        values[name] = _coerce(members[name], value, key, path)
    return values


def parse_settings(pairs: tuple[str, ...]) -> dict[str, str]:
    """{key: value} of "key=value" texts. Raises UsageError for another form and for a key given twice."""
    settings: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise UsageError(f"--set {pair!r}: write key=value")
        if key in settings:
            raise UsageError(f"--set {key!r} is given twice")
        settings[key] = value
    return settings


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"job file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"job file {path} is not TOML: {error}") from error


def _fill_settings(table: dict[str, Any], settings: Mapping[str, str], path: Path) -> dict[str, Any]:
    used: set[str] = set()

    def replace(match: "re.Match[str]") -> str:
        used.add(match[1])
        return settings.get(match[1], match[0])

    def fill(value: Any) -> Any:
        if isinstance(value, str):
            return _PLACEHOLDER.sub(replace, value)
        if isinstance(value, list):
            return [fill(item) for item in value]
        return value

    filled = {key: fill(value) for key, value in table.items()}
    for key in sorted(used - set(settings)):
        raise UsageError(f"{path}: nothing fills {{{key}}}; give --set {key}=VALUE")
    for key in sorted(set(settings) - used):
        raise UsageError(
            f"--set {key}: {path} has no {{{key}}} to fill; an option is given by its flag, as without --job"
        )
    return filled


def _coerce(member: "Field[Any]", value: Any, key: str, path: Path) -> Any:
    try:
        return coerce(member, value)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path}: {key}: {error}") from error
