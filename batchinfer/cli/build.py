"""`batchinfer build`: compiles the native kernels ahead of the first run."""

import click


@click.command(short_help="Compile the CPU kernels ahead of the first run.")
def build() -> None:
    """Compile the CPU kernels for this machine, which the first run does otherwise. Prints their directory."""
    from batchinfer.executors.local import build_kernels  # here, as it brings torch

    click.echo(build_kernels(lambda line: click.echo(f"batchinfer: {line}", err=True)))
