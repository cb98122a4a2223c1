"""The entry point `batchinfer`: the commands, and how errors become one line and an exit code."""

import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from batchinfer import __version__
from batchinfer.cli.bench import bench
from batchinfer.cli.build import build
from batchinfer.cli.evaluate import evaluate
from batchinfer.cli.plan import plan
from batchinfer.cli.quantize import quantize
from batchinfer.cli.report import report
from batchinfer.cli.run import run
from batchinfer.cli.show import show
from batchinfer.errors import BatchInferError, ExitCode
from batchinfer.process import StopSignals


@click.group(context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="batchinfer")
def batchinfer() -> None:
    """Offline batch inference for large language models: Parquet or JSONL in, completions and latency statistics
    out."""


batchinfer.add_command(run)
batchinfer.add_command(plan)
batchinfer.add_command(show)
batchinfer.add_command(report)
batchinfer.add_command(bench)
batchinfer.add_command(evaluate)
batchinfer.add_command(quantize)
batchinfer.add_command(build)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and leaves with its exit code."""
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    try:
        with StopSignals():
            return int(batchinfer.main(arguments, prog_name="batchinfer", standalone_mode=False) or ExitCode.DONE)
    except click.UsageError as error:
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # click before 8.2 leaves quietly
            error.show()
            return error.exit_code
        command = error.ctx.command_path if error.ctx else "batchinfer"
        return _fail(f"{error.format_message()} (`{command} --help` says more)", ExitCode.USAGE)
    except click.Abort:
        return _fail("interrupted; the same command carries on", ExitCode.INTERRUPTED)
    except BatchInferError as error:
        return _fail(str(error), error.exit_code)
    except OSError as error:  # a closed pipe never comes here: click leaves quietly
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", ExitCode.FAILED)


def _fail(message: str, code: ExitCode) -> ExitCode:
    click.echo(f"batchinfer: error: {' '.join(message.split())}", err=True)
    return code
