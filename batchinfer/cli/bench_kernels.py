"""`batchinfer bench kernels`: checks the GPU kernels, compiled only or on a device, and there a whole model too."""

import click

from batchinfer.cli.bench_model import model_sizes
from batchinfer.cli.options import DURATION
from batchinfer.cli.results import ResultFile, json_option, say, show
from batchinfer.errors import BatchInferError, UsageError


@click.command(short_help="The GPU: its kernels, compiled for a target or measured, and a whole model on it.")
@click.option("--compile-only", is_flag=True, help="Compile for each --target, without a GPU, and check the code.")
@click.option("--target", default="sm_80,sm_90,sm_100,gfx942", show_default=True, help="Comma-separated.")
@click.option("--model", "model_names", multiple=True, metavar="NAME", help="Kernels of this model only; repeatable.")
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    show_default=True,
    help="Where to measure; a CPU has the model's part only.",
)
@click.option(
    "--part",
    "parts",
    type=click.Choice(["kernels", "model"]),
    multiple=True,
    default=("kernels", "model"),
    show_default=True,
    help="What to measure; repeatable.",
)
@click.option("--budget", type=DURATION, default="8m", show_default=True, help="All of it ends within this time.")
@model_sizes
@json_option
def kernels(
    compile_only: bool,
    target: str,
    model_names: tuple[str, ...],
    device: str,
    parts: tuple[str, ...],
    budget: float,
    shape: str,
    workloads: tuple[str, ...],
    num_seqs: int,
    json_file: ResultFile | None,
) -> None:
    """Check the GPU kernels at the sizes of known models.

    With --compile-only: registers, spills, shared memory and instructions of each; fails where a kernel spills, needs
    more shared memory than the target has, loads by less than 16 bytes, or lacks the target's matrix instructions.

    Otherwise each kernel runs on the device beside its reference and is timed against the device's own copy bandwidth
    and matrix products, and then a model runs as in bench model, with an fp8 cache. Beside each figure stands what is
    aimed at on an H200. Fails where a kernel's results differ or a part does not come to its end, whose figures until
    then are shown; says what the time did not suffice for.
    """
    if compile_only:
        _compile(target.split(","), model_names)
        return
    from batchinfer.executors.gpu_check import CheckRequest, GpuCheck  # here, as they bring torch
    from batchinfer.executors.kernel_cases import models
    from batchinfer.executors.kernel_device import ready

    models(model_names)
    if device == "cpu" and "kernels" in parts:
        raise UsageError("--device cpu: give --part model, or --compile-only, which checks the kernels without a GPU")
    if device == "cuda" and not ready(device):
        raise UsageError("no CUDA device is here: --compile-only checks the kernels without one")
    request = CheckRequest(
        parts=parts,
        models=model_names,
        shape=shape,
        workloads=_checked(workloads, num_seqs),
        num_seqs=num_seqs,
        device=device,
        budget_s=budget,
    )
    check = GpuCheck(request, lambda line: show(line, json_file), say)
    try:
        check.run()
    finally:
        for line in check.summary():
            show(line, json_file)
        if json_file is not None:
            json_file.write_json(check.to_json())
    if check.found.num_wrong or check.found.failures:
        raise BatchInferError(
            f"{check.found.num_wrong} kernels differ from their references, {len(check.found.failures)} failures"
        )


def _checked(workloads: tuple[str, ...], num_seqs: int) -> tuple[str, ...]:
    """The workloads as the model's part tells them. Raises UsageError before any time is spent."""
    from batchinfer.executors.model_speed import Workload, speed_config  # here, as it brings torch

    loads = [Workload.parse(text) for text in workloads]
    try:
        speed_config({"max_num_seqs": num_seqs})
    except ValueError as error:
        raise UsageError(str(error)) from error
    return tuple(f"{load.num_inputs}/{load.num_outputs}" for load in loads)


def _compile(target_names: list[str], model_names: tuple[str, ...]) -> None:
    from batchinfer.executors import kernel_gates  # here, as they bring torch
    from batchinfer.executors.kernel_cases import models

    chosen, shapes = kernel_gates.targets(target_names), models(model_names)
    click.echo(kernel_gates.table_head())
    failed = 0
    for verdict in kernel_gates.all_verdicts(chosen, shapes):
        click.echo(kernel_gates.table_row(verdict))
        failed += bool(verdict.faults)
    if failed:
        raise BatchInferError(f"{failed} kernels fail their gates; the last column of the table says which")
