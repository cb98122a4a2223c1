"""Makes the page of a finished job and the files of its plots. Called by the command line."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from batchinfer.data.read_output import iter_results
from batchinfer.data.storage import open_storage
from batchinfer.errors import UsageError
from batchinfer.report.figures import draw, plots
from batchinfer.report.job_files import FinishedJob, open_job
from batchinfer.report.page import render
from batchinfer.report.roofline_page import job_threads
from batchinfer.report.row_figures import COLUMNS, collect
from batchinfer.roofline import DevicePeaks, load_peaks, machine_name


class Written(NamedTuple):
    """Where the report is."""

    page: str
    png_folder: str
    num_pngs: int


def write_report(target: str, page: str | None = None, png_folder: str | None = None) -> Written:
    """Reads the output at `target`, its directory or single file, and writes the page and the plots, each whole or not
    at all.

    page: default _report.html in the directory, as readers of Parquet pass over such names, or FILE.report.html.
    png_folder: default _report, or FILE.report. Raises UsageError where there is no finished output, or the page would
    be no file, and BatchInferError where nothing can be written.
    """
    job = open_job(target)
    page = page or _beside(job, job.layout.report)
    if os.path.exists(local := os.path.expanduser(page)) and not os.path.isfile(local):
        raise UsageError(f"--output {page}: is a directory or a device; give the path of the page")
    rows = collect(iter_results(target, COLUMNS))
    peaks = known_peaks(job.stats)
    drawn = [draw(plot) for plot in plots(job.stats, rows, peaks)]
    png_folder = png_folder or _beside(job, job.layout.report_plots)
    for one in drawn:
        _put(f"{png_folder.rstrip('/')}/{one.plot.name}.png", one.png)
    _put(page, render(job, rows, drawn, peaks).encode())
    return Written(page, png_folder, len(drawn))


def known_peaks(stats: Mapping[str, Any]) -> DevicePeaks | None:
    """Those stored for the machine that the job ran on, where it is this one: in the job's dtype with its threads,
    else in its dtype with the most, else in any dtype with the most."""
    device, dtype, threads = stats["device"], stats["work"]["dtype"], job_threads(stats)
    if stats["machine"] != machine_name(device):
        return None
    return load_peaks(device, dtype, threads) or load_peaks(device, dtype) or load_peaks(device)


def _beside(job: FinishedJob, name: str) -> str:
    root = job.layout.root
    return name if root == "." else f"{root.rstrip('/')}/{name}"


def _put(path: str, data: bytes) -> None:
    whole = path if "://" in path else os.path.abspath(os.path.expanduser(path))
    folder, _, name = whole.rpartition("/")
    open_storage(folder or "/", ".").put(name, data)
