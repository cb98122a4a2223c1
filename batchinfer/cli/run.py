"""`batchinfer run`: answers every row of the input."""

import click

from batchinfer.cli.options import JobCommand, effective_options
from batchinfer.errors import ExitCode


@click.command(cls=JobCommand, short_help="Answer every row of the input.")
@click.pass_context
def run(ctx: click.Context, **_: object) -> ExitCode:
    """Answer every row of the input and write the answers with their statistics.

    Killed or interrupted, the same command carries on where it stopped. Exit codes: 0 done, 1 failed, 2 usage,
    3 done but over --max-errors, 75 interrupted and resumable.
    """
    options = effective_options(ctx)
    from batchinfer.pipeline import run_job  # here, as it brings torch

    return run_job(options)
