"""Turns the options declared in config.py into click options, grouped in the help text; used by each command that
takes run's options."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from batchinfer.config import JobConfig, iter_options
from batchinfer.job_file import parse_settings, read_job_file
from batchinfer.options import EffectiveOptions, scalar_type
from batchinfer.units import parse_duration, parse_size

_JOB_FILE_TITLE = "Job file: any of these options in TOML; flags override it."


class JobOption(click.Option):
    """An option that stands under a title of the help text."""

    def __init__(self, *args: Any, title: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.title = title


class TitledCommand(click.Command):
    """A command whose help text has a section a title. more_options: that come after its own."""

    def __init__(self, *args: Any, more_options: Sequence[click.Option] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params = [*self.params, *more_options]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One section a group, titled by what the group is about; the command's own options come first."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(param, "title", "Options:"), []).append(record)
        for title, records in sections.items():
            formatter.write_paragraph()
            formatter.write_text(title)
            with formatter.indentation():
                formatter.write_dl(records)


class JobCommand(TitledCommand):
    """A command that takes every option of run, after its own; its callback calls `effective_options`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, more_options=_job_options(), **kwargs)


def effective_options(ctx: click.Context, own: Mapping[str, Any] | None = None) -> EffectiveOptions:
    """The options of this call, each with its source. own: what the command chooses where the call does not say.
    Raises UsageError."""
    job, settings = ctx.params["job"], ctx.params["settings"]
    if settings and job is None:
        raise click.UsageError("--set fills a job file; give --job FILE as well", ctx)
    names = {member.name for _, member in iter_options()}
    flags = {
        name: value
        for name, value in ctx.params.items()
        if name in names and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    job_file = read_job_file(Path(job), parse_settings(settings)) if job else {}
    return EffectiveOptions.resolve(flags, {**(own or {}), **job_file})


def options_of_run(names: Sequence[str], title: str, prefix: str = "") -> list[click.Option]:
    """The options of run with these names, under one title. prefix: of their names here, as in "against_"."""
    members = {member.name: member for _, member in iter_options()}
    return [_click_option(members[name], title, prefix) for name in names]


def _job_options() -> list[click.Option]:
    titles = {group.name: _title(group) for group in dataclasses.fields(JobConfig)}
    options = [_click_option(member, titles[group]) for group, member in iter_options()]
    job = JobOption(
        ["--job"],
        title=_JOB_FILE_TITLE,
        metavar="FILE.toml",
        help="Read options from this file. Paths in it are relative to the working directory.",
    )
    settings = JobOption(
        ["--set", "settings"],
        title=_JOB_FILE_TITLE,
        multiple=True,
        metavar="KEY=VALUE",
        help="Fill {KEY} in the job file's text. Repeatable.",
    )
    return [*options, job, settings]


def _title(group: "Field[Any]") -> str:
    """ "Cache: the paged KV cache." of a group called `cache` whose class is described as "The paged KV cache." """
    description = " ".join((type(group.default).__doc__ or "").split()).partition(". ")[0].rstrip(".")
    return f"{group.name.capitalize()}: {description[:1].lower()}{description[1:]}."


def _click_option(member: "Field[Any]", title: str, prefix: str = "") -> click.Option:
    name = prefix + member.name
    flag = "--" + name.replace("_", "-")
    help_text = member.metadata["help"] + _default_note(member.default)
    if member.metadata["kind"] == "flag":
        return JobOption([f"{flag}/--no-{flag[2:]}", name], title=title, default=None, help=help_text)
    return JobOption(
        [flag, name],
        title=title,
        type=_click_type(member),
        multiple=member.metadata["kind"] == "many",
        metavar=member.metadata["metavar"] or None,
        help=help_text,
    )


def _default_note(default: Any) -> str:
    if default is None or default is False or default in ((), ""):
        return ""
    return f"  [default: {'on' if default is True else default}]"


class _ParsedType(click.ParamType):
    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


DURATION = _ParsedType("duration", parse_duration)


def _click_type(member: "Field[Any]") -> click.ParamType:
    if member.metadata["choices"]:
        return click.Choice(member.metadata["choices"])
    if member.metadata["kind"] == "size":
        return _ParsedType("size", parse_size)
    if member.metadata["kind"] == "duration":
        return DURATION
    return {str: click.STRING, int: click.INT, float: click.FLOAT}[scalar_type(member)]
