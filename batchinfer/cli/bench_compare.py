"""`batchinfer bench compare`: the same job in several variants, side by side."""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from batchinfer.cli.options import JobCommand, effective_options
from batchinfer.cli.results import RESULT_FILE, ResultFile, json_option, say, show
from batchinfer.comparison.compare import compare as compared
from batchinfer.comparison.table import comparison_table
from batchinfer.comparison.variants import cross_product, parse_variations
from batchinfer.errors import BatchInferError

Figures = dict[str, Any]


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
    "--confirm",
    is_flag=True,
    help="In place of --vary: run jobs of its own, without and with continuous batching, paged KV, prefix caching, "
    "packed order and fp8 KV, and show a Markdown table. Of run's options it takes those of the model.",
)
@click.option("--quantized-model", metavar="PATH|ID", help="With --confirm: compare these weights with --model's, too.")
@click.option(
    "--markdown",
    type=RESULT_FILE,
    metavar="FILE",
    help="With --confirm: write the table here, too.",
)
@json_option
@click.pass_context
def compare(
    ctx: click.Context,
    vary: tuple[str, ...],
    repeat: int,
    confirm: bool,
    quantized_model: str | None,
    markdown: ResultFile | None,
    json_file: ResultFile | None,
    **_: object,
) -> None:
    """Run one job in several variants and show their speed, latencies and memory side by side.

    Each run is a process of its own; figures are medians over the rounds, with the lowest and the highest speed.
    """
    if confirm == bool(vary):
        raise click.UsageError("give --vary OPTION=V1,V2 (repeatable) or --confirm, one of the two", ctx)
    if not confirm and (quantized_model or markdown):
        raise click.UsageError("--quantized-model and --markdown belong to --confirm", ctx)
    if confirm:
        figures, text = _confirm(ctx, quantized_model, repeat)
    else:
        figures = _compare(ctx, vary, repeat)
        text = comparison_table(figures)
    show(text, json_file, markdown)
    _write_each(((json_file, json.dumps(figures, indent=2)), (markdown, text)))


def _write_each(texts: Iterable[tuple[ResultFile | None, str]]) -> None:
    """Also where another file cannot be written: what was measured took minutes. Raises OSError for one that could not,
    BatchInferError for several."""
    failures = []
    for file, text in texts:
        try:
            if file is not None:
                file.write(text + "\n")
        except OSError as error:
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise BatchInferError("; ".join(f"{error.filename}: {error.strerror}" for error in failures))


def _compare(ctx: click.Context, vary: tuple[str, ...], rounds: int) -> Figures:
    variations = parse_variations(vary)
    own = {variation.option: variation.values[0] for variation in variations if variation.option == "input"}
    options = effective_options(ctx, own)
    for variation in variations:
        if options[variation.option].source == "flag":
            flag = "--" + variation.option.replace("_", "-")
            raise click.UsageError(f"{flag} is given and varies, too; leave out one of the two", ctx)
    return compared(options, cross_product(variations), rounds, say)


def _confirm(ctx: click.Context, quantized_model: str | None, rounds: int) -> tuple[Figures, str]:
    from batchinfer.comparison.confirm import confirm as confirmed  # here, as it brings models/
    from batchinfer.comparison.confirm_table import confirm_table

    with tempfile.TemporaryDirectory(prefix="batchinfer-") as folder:
        options = effective_options(ctx, {"input": (folder,)})
        figures = confirmed(options, quantized_model, rounds, Path(folder), say)
    return figures, confirm_table(figures)
