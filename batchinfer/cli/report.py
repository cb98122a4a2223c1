"""`batchinfer report`: makes a page of plots and figures of a finished job."""

import click

from batchinfer.errors import ExitCode


@click.command(short_help="Make a page of plots and figures of a finished job.")
@click.argument("output", metavar="OUTPUT")
@click.option("--output", "page", metavar="PATH", help="The page.  [default: OUTPUT/_report.html or FILE.report.html]")
@click.option("--png-dir", metavar="DIR", help="The plots as PNG files.  [default: OUTPUT/_report/ or FILE.report/]")
def report(output: str, page: str | None, png_dir: str | None) -> ExitCode:
    """Make one HTML page, which opens without a network, and PNG files of its plots: latencies, throughput, batch size
    and KV cache over time, errors, slowest rows, and where the time went against the device's peaks, which
    `batchinfer plan --calibrate` measures.

    OUTPUT is the --output of a finished job: its directory or its single file.
    """
    from batchinfer.report.write import write_report  # here, as it brings pyarrow and matplotlib

    written = write_report(output, page, png_dir)
    click.echo(f"{written.page} and {written.num_pngs} plots in {written.png_folder.rstrip('/')}/")
    return ExitCode.DONE
