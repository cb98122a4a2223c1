"""`batchinfer bench model`: the speed of a model's shape, with weights drawn at random."""

from collections.abc import Callable

import click

from batchinfer.cli.options import TitledCommand, options_of_run
from batchinfer.cli.results import ResultFile, json_option, say, show
from batchinfer.errors import UsageError

SHAPES = ("llama-3.1-8b", "tiny")
_OPTIONS = (
    *("device", "activation_dtype", "kv_cache_dtype", "kv_cache_memory", "max_num_batched_tokens"),
    *("enforce_eager", "threads"),
)


def model_sizes(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that say what is measured: shape, workloads, num_seqs."""
    options = (
        click.option("--shape", type=click.Choice(SHAPES), default=SHAPES[0], show_default=True, help="Of the model."),
        click.option(
            "--workload",
            "workloads",
            multiple=True,
            metavar="IN/OUT",
            default=("1000/1000", "128/2048", "2048/128"),
            show_default=True,
            help="Tokens of each prompt and answer; repeatable.",
        ),
        click.option("--num-seqs", default=512, show_default=True, help="Sequences at once."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command(
    cls=TitledCommand,
    more_options=options_of_run(_OPTIONS, "Engine: as for run."),
    short_help="A model's shape with weights drawn at random, beside its roofline.",
)
@model_sizes
@click.option("--seconds", default=20.0, show_default=True, help="How long each workload is measured.")
@json_option
def model(
    shape: str,
    workloads: tuple[str, ...],
    num_seqs: int,
    seconds: float,
    json_file: ResultFile | None,
    **values: object,
) -> None:
    """Measure output tokens per second of a model whose weights (AWQ, 4 bits in groups of 128) are drawn at random,
    beside what the device's measured peaks allow for the same work: its copies, and its large products in what the
    layers' products run in.

    The KV cache is fp8, unless --kv-cache-dtype says otherwise.
    """
    from batchinfer.executors.model_speed import Workload, figures_line, measure_model, speed_config  # it brings torch

    given = {name: value for name, value in values.items() if value is not None}
    try:
        config = speed_config({"max_num_seqs": num_seqs, **given})
    except ValueError as error:
        raise UsageError(str(error)) from error
    loads = [Workload.parse(text) for text in workloads]
    found = []
    for figures in measure_model(shape, loads, config, seconds, say):
        show(figures_line(figures), json_file)
        found.append(figures)
    if json_file is not None:
        json_file.write_json(found)
