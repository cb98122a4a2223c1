"""`batchinfer bench`: measures a job without writing its answers."""

import json
from typing import TextIO

import click

from batchinfer.cli.options import JobCommand, effective_options


@click.group()
def bench() -> None:
    """Measure a job; its answers are not written."""


@bench.command(cls=JobCommand, short_help="Tokens per second, latencies and memory.")
@click.option(
    "--json", "json_file", type=click.File("w", lazy=False), metavar="FILE", help="Write the figures here as JSON."
)
@click.option(
    "--agreement",
    is_flag=True,
    help="Then answer the rows again in float32 and show how many tokens agree before the first difference; for greedy "
    "jobs (--temperature 0).",
)
@click.option("--agreement-with", metavar="PATH|ID", help="The same, but with this model.")
@click.pass_context
def throughput(
    ctx: click.Context, json_file: TextIO | None, agreement: bool, agreement_with: str | None, **_: object
) -> None:
    """Run the whole job in memory and show tokens per second, latencies and memory."""
    options = effective_options(ctx)
    from batchinfer.pipeline import bench_throughput  # here, as it brings torch
    from batchinfer.summary import summary_table

    figures = bench_throughput(options, agreement, agreement_with)
    if json_file is not None:
        json_file.write(json.dumps(figures, indent=2) + "\n")
    click.echo(summary_table(figures))
