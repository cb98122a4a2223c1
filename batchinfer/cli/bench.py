"""`batchinfer bench`: measures a job without writing its answers."""

from typing import Any

import click

from batchinfer.cli.bench_compare import compare
from batchinfer.cli.bench_kernels import kernels
from batchinfer.cli.bench_model import model
from batchinfer.cli.options import JobCommand, TitledCommand, effective_options, options_of_run
from batchinfer.cli.results import ResultFile, json_option, say, show
from batchinfer.config import JobConfig
from batchinfer.errors import UsageError

_OF_A_STEP = ("dtype", "activation_dtype", "quantization", "kv_cache_dtype", "kv_cache_memory", "threads")


@click.group()
def bench() -> None:
    """Measure a job; its answers are not written."""


bench.add_command(compare)
bench.add_command(kernels)
bench.add_command(model)


@bench.command(cls=JobCommand, short_help="Tokens per second, latencies and memory.")
@json_option
@click.option(
    "--agreement",
    is_flag=True,
    help="Then answer the rows again in float32 and show how many tokens agree before the first difference; for greedy "
    "jobs (--temperature 0).",
)
@click.option("--agreement-with", metavar="PATH|ID", help="The same, but with this model.")
@click.pass_context
def throughput(
    ctx: click.Context, json_file: ResultFile | None, agreement: bool, agreement_with: str | None, **_: object
) -> None:
    """Run the whole job in memory and show tokens per second, latencies and memory."""
    options = effective_options(ctx)
    from batchinfer.pipeline import bench_throughput  # here, as it brings torch
    from batchinfer.summary import summary_table

    figures = bench_throughput(options, agreement, agreement_with)
    show(summary_table(figures), json_file)
    if json_file is not None:
        json_file.write_json(figures)


@bench.command(
    cls=TitledCommand,
    more_options=options_of_run(("model", *_OF_A_STEP), "Model: what runs, as for run."),
    short_help="Where the time of a step goes.",
)
@click.option("--num-seqs", default=256, metavar="N", help="Sequences that decode.  [default: 256]")
@click.option("--context", default=128, metavar="N", help="Tokens of each sequence and prompt.  [default: 128]")
@click.option("--prefill-tokens", default=2048, metavar="N", help="Tokens of a prefill step.  [default: 2048]")
@json_option
def step(num_seqs: int, context: int, prefill_tokens: int, json_file: ResultFile | None, **values: Any) -> None:
    """Time a prefill step and a decode step on the CPU, operation by operation, on tokens drawn at random."""
    from batchinfer.executors.step_profile import StepShape, profile_steps, step_table  # here, as it brings torch

    try:
        shape = StepShape(num_seqs=num_seqs, context=context, prefill_tokens=prefill_tokens)
        given = {name: value for name, value in values.items() if value is not None}
        config = JobConfig.from_options({**given, "device": "cpu"})  # a GPU's operations run on after the call's end
    except ValueError as error:
        raise UsageError(str(error)) from error
    figures = profile_steps(config, shape, say)
    show(step_table(figures), json_file)
    if json_file is not None:
        json_file.write_json(figures)
