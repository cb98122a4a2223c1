"""`batchinfer build`: compiles the native kernels ahead of the first run."""

from pathlib import Path

import click

from batchinfer.cli.results import say


@click.command(short_help="Compile the CPU kernels ahead of the first run.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Compile here, for every kind of CPU of this architecture. Machines without a compiler load them from the "
    "directory that BATCHINFER_KERNELS names, or from batchinfer/kernels/prebuilt in the installed package.",
)
def build(output: Path | None) -> None:
    """Compile the CPU kernels for this machine, which the first run does otherwise. Prints their directory."""
    from batchinfer.executors.local import build_kernels  # here, as it brings torch

    click.echo(build_kernels(say, output))
