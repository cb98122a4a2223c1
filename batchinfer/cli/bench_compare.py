"""`batchinfer bench compare`: the same job in several variants, side by side."""

import json
from typing import Any, TextIO

import click

from batchinfer.cli.options import JobCommand, effective_options
from batchinfer.comparison.compare import compare as compared
from batchinfer.comparison.table import comparison_table
from batchinfer.comparison.variants import cross_product, parse_variations


@click.command(cls=JobCommand, short_help="One job in several variants, side by side.")
@click.option(
    "--vary",
    multiple=True,
    metavar="OPTION=V1,V2",
    help="An option of `run` and its values; flags take on,off. Several --vary are run in each combination. Where an "
    "option comes in several --vary, each gives one value, commas included.",
)
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=2,
    metavar="N",
    help="Rounds: each runs all variants, every other one backwards.  [default: 2]",
)
@click.option(
    "--json", "json_file", type=click.File("w", lazy=False), metavar="FILE", help="Write the figures here as JSON."
)
@click.pass_context
def compare(ctx: click.Context, vary: tuple[str, ...], repeat: int, json_file: TextIO | None, **_: object) -> None:
    """Run one job in several variants and show their speed, latencies and memory side by side.

    Each run is a process of its own; figures are medians over the rounds, with the lowest and the highest speed.
    """
    if not vary:
        raise click.UsageError("nothing to compare: give --vary OPTION=V1,V2", ctx)
    variants = cross_product(parse_variations(vary))
    figures = compared(effective_options(ctx), variants, repeat, _say)
    _write(json_file, figures)
    click.echo(comparison_table(figures))


def _write(json_file: TextIO | None, figures: dict[str, Any]) -> None:
    if json_file is not None:
        json_file.write(json.dumps(figures, indent=2) + "\n")


def _say(line: str) -> None:
    click.echo(f"batchinfer: {line}", err=True)
