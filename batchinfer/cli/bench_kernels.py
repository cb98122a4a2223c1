"""`batchinfer bench kernels`: checks the GPU kernels, compiled only or on a device."""

import click

from batchinfer.errors import BatchInferError, UsageError


@click.command(short_help="The GPU kernels: compiled for a target, or measured on a device.")
@click.option("--compile-only", is_flag=True, help="Compile for each --target, without a GPU, and check the code.")
@click.option("--target", default="sm_80,sm_90,sm_100,gfx942", show_default=True, help="Comma-separated.")
@click.option("--model", "model_names", multiple=True, metavar="NAME", help="Sizes of this model only; repeatable.")
@click.option("--device", type=click.Choice(["cuda"]), default="cuda", show_default=True, help="Where to measure.")
def kernels(compile_only: bool, target: str, model_names: tuple[str, ...], device: str) -> None:
    """Check the GPU kernels at the sizes of known models.

    With --compile-only: registers, spills, shared memory and instructions of each; fails where a kernel spills, needs
    more shared memory than the target has, loads by less than 16 bytes, or lacks the target's matrix instructions.

    Otherwise each kernel runs on the device beside its reference and is timed against the device's own copy bandwidth
    and matrix products; fails where results differ.
    """
    if compile_only:
        _compile(target.split(","), model_names)
        return
    from batchinfer.executors.kernel_device import checks, ready  # here, as it brings torch
    from batchinfer.executors.kernel_gates import models

    shapes = models(model_names)
    if not ready(device):
        raise UsageError("no CUDA device is here: --compile-only checks the kernels without one")
    failed = 0
    for line, is_right in checks(shapes, device):
        click.echo(line)
        failed += not is_right
    if failed:
        raise BatchInferError(f"{failed} kernels differ from their references")


def _compile(target_names: list[str], model_names: tuple[str, ...]) -> None:
    from batchinfer.executors import kernel_gates  # here, as it brings torch

    chosen, shapes = kernel_gates.targets(target_names), kernel_gates.models(model_names)
    click.echo(kernel_gates.table_head())
    failed = 0
    for target in chosen:
        for model in shapes:
            for verdict in kernel_gates.verdicts(target, model):
                click.echo(kernel_gates.table_row(verdict))
                failed += bool(verdict.faults)
    if failed:
        raise BatchInferError(f"{failed} kernels fail their gates; the last column of the table says which")
