"""The effective options of a job: each option's value and where it came from. Made by cli/ from flags and a job file,
read by the pipeline, logged once and stored with the output."""

import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import Field
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from batchinfer.config import JobConfig, iter_options
from batchinfer.errors import UsageError
from batchinfer.units import format_exact_bytes, parse_duration, parse_size

Source = Literal["flag", "job file", "generation_config", "checkpoint", "reference run", "bench", "default"]
_MOST_CHARACTERS = 80  # of a quoted value that is shown


class OptionValue(NamedTuple):
    """An option's value and where it came from."""

    value: Any
    source: Source


class EffectiveOptions(Mapping[str, OptionValue]):
    """Every option of a job by name, with its value and source. Immutable."""

    def __init__(self, values: Mapping[str, OptionValue]) -> None:
        self._values = dict(values)

    @classmethod
    def resolve(cls, flags: Mapping[str, Any], job_file: Mapping[str, Any] | None = None) -> "EffectiveOptions":
        """Flags win over the job file, which wins over the defaults. Values are already of their option's type.

        Raises UsageError where a rule of the configuration is broken or there is no input.
        """
        values = {member.name: OptionValue(member.default, "default") for _, member in iter_options()}
        values |= {name: OptionValue(value, "job file") for name, value in (job_file or {}).items()}
        values |= {name: OptionValue(value, "flag") for name, value in flags.items()}
        options = cls(values)
        if not options.config.input.input:
            raise UsageError("no input: give --input PATH, or `input` in the job file")
        return options

    @cached_property
    def config(self) -> JobConfig:
        """The same options as frozen dataclasses. Raises UsageError naming the option and the allowed values."""
        try:
            return JobConfig.from_options({name: option.value for name, option in self.items()})
        except ValueError as error:
            raise UsageError(str(error)) from error

    def refined(self, values: Mapping[str, OptionValue]) -> "EffectiveOptions":
        """With `values`, known once the model's files are read, in place of defaults; what a flag or a job file said
        stays."""
        said = {name: option for name, option in self.items() if option.source != "default"}
        return EffectiveOptions(self._values | dict(values) | said)

    def replaced(self, values: Mapping[str, Any], source: Source) -> "EffectiveOptions":
        """With `values` in place of what was said."""
        return EffectiveOptions(self._values | {name: OptionValue(value, source) for name, value in values.items()})

    def to_json(self) -> dict[str, dict[str, Any]]:
        """{name: {"value": ..., "source": ...}} in the order of the help text, for _stats.json and metadata."""
        return {name: {"value": _plain(option.value), "source": option.source} for name, option in self.items()}

    def describe(self) -> str:
        """The options that are not at their defaults, sampling aside, in one line, as in
        "input=a.parquet, dtype=fp32 (flag); max_num_seqs=8 (job file)"."""
        members = [member for group, member in iter_options() if group != "sampling"]
        return self._by_source([member for member in members if self[member.name].source != "default"])

    def describe_sampling(self) -> str:
        """Each sampling parameter of rows that carry none, in one line: "temperature=0.2 (flag); top_p=1.0, …
        (default)"."""
        return self._by_source([member for group, member in iter_options() if group == "sampling"])

    def _by_source(self, members: "Sequence[Field[Any]]") -> str:
        texts: dict[Source, list[str]] = {source: [] for source in get_args(Source)}
        for member in members:
            value, source = self[member.name]
            texts[source].append(f"{member.name}={shown(member, value)}")
        return "; ".join(f"{', '.join(found)} ({source})" for source, found in texts.items() if found)

    def __getitem__(self, name: str) -> OptionValue:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def did_you_mean(name: str, known: Collection[str]) -> str | None:
    """A question that names the known option nearest to `name`."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else None


def shown(member: "Field[Any]", value: Any) -> str:
    """A value as one would write it on the command line, in one line."""
    if value is None:
        return member.metadata["unset"]
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(_quoted(str(item)) for item in value) or member.metadata["unset"]
    formats = {"size": format_exact_bytes, "duration": lambda seconds: f"{seconds:g}s"}
    return formats.get(member.metadata["kind"], lambda other: _quoted(str(other)))(value)


def _quoted(text: str) -> str:
    """The text itself where it is a plain word; else as a JSON string, a long one cut."""
    if re.fullmatch(r"[\w./:@%+*?~-]+", text):
        return text
    return json.dumps(text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "…", ensure_ascii=False)


def scalar_type(member: "Field[Any]") -> type:
    """The type of an option's value, or of one of its values where it is repeatable: str, int, float or bool."""
    kinds = [kind for kind in get_args(member.type) if kind not in (type(None), Ellipsis)] or [member.type]
    inner = get_args(kinds[0])
    kind = inner[0] if inner else kinds[0]
    assert isinstance(kind, type), member.name
    return kind


def coerce(member: "Field[Any]", value: Any) -> Any:
    """`value`, from a job file or from Python, as the option's type; text is read as on the command line.

    Raises ValueError saying what the option takes.
    """
    kind = member.metadata["kind"]
    if kind == "many":
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(_coerce_scalar(member, v) for v in values)
    if kind == "json":
        return value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, str) and kind == "size":
        return parse_size(value)
    if isinstance(value, str) and kind == "duration":
        return parse_duration(value)
    return _coerce_scalar(member, value)


def _coerce_scalar(member: "Field[Any]", value: Any) -> Any:
    wanted = scalar_type(member)
    if isinstance(value, str):
        return value if wanted is str else _parse_scalar(wanted, value)
    if isinstance(value, bool) == (wanted is bool) and isinstance(value, _ACCEPTED[wanted]):
        return wanted(value)
    raise ValueError(f"{value!r} is not {_WANTED[wanted]}")


_ACCEPTED: dict[type, tuple[type, ...]] = {str: (int, float), int: (int,), float: (int, float), bool: (bool,)}
_WANTED = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _parse_scalar(wanted: type, text: str) -> Any:
    if wanted is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
    else:
        try:
            return wanted(text)
        except ValueError:
            pass
    raise ValueError(f"{text!r} is not {_WANTED[wanted]}")
