"""`batchinfer plan`: what a job will take, before it runs."""

import click

from batchinfer.cli.options import JobCommand, effective_options
from batchinfer.cli.results import ResultFile, json_option, say, show


@click.command(cls=JobCommand, short_help="What a job will take, without loading weights.")
@json_option
@click.option(
    "--calibrate",
    is_flag=True,
    help="First load the model and time some of its steps; later plans with the same model and precision use that.",
)
@click.option(
    "--expected-output-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens of an answer that may end before its max_tokens.  [default: max_tokens]",
)
@click.pass_context
def plan(
    ctx: click.Context,
    json_file: ResultFile | None,
    calibrate: bool,
    expected_output_tokens: int | None,
    **_: object,
) -> None:
    """Show what a job will take: rows and their faults, tokens, memory, steps, time, and what would help most.

    Takes every option of run. No weights are loaded and no GPU is needed, unless --calibrate asks for it.
    """
    options = effective_options(ctx)
    from batchinfer.planning.plan import PlanRequest, plan_job  # here, as it brings numpy and torch
    from batchinfer.planning.table import plan_table

    request = PlanRequest(calibrate=calibrate, expected_output_tokens=expected_output_tokens)
    figures = plan_job(options, request, say)
    show(plan_table(figures), json_file)
    if json_file is not None:
        json_file.write_json(figures)
