"""Which plots a job's page has, by section, and their drawing as SVG and PNG. Used by write.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from batchinfer.report.latency_plots import distribution_functions, latency_histogram
from batchinfer.report.roofline_plots import roofline, shares_over_time
from batchinfer.report.roofline_shares import interval_work, run_work
from batchinfer.report.row_figures import RowFigures
from batchinfer.report.theme import PAGE, PAPER, Theme, rc, to_png, to_svg
from batchinfer.report.timeline_plots import (
    TimelineView,
    batch_size,
    kv_cache,
    prompts,
    throughput,
    where_the_time_went,
)
from batchinfer.roofline import DevicePeaks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS_OF_INFERENCE = {
    "forward": "forward passes",
    "sample": "sampling",
    "schedule": "scheduling",
    "postprocess": "results",
}


@dataclass(frozen=True, slots=True)
class Plot:
    """name: of the PNG file. section: of the page. caption: how to read it."""

    section: str
    name: str
    title: str
    caption: str
    draw: "Callable[[Theme], Figure]"


@dataclass(frozen=True, slots=True)
class DrawnPlot:
    """A plot as the page and a file hold it."""

    plot: Plot
    svg: str
    png: bytes


def draw(plot: Plot) -> DrawnPlot:
    """Both forms, by matplotlib."""
    import matplotlib

    with matplotlib.rc_context(rc(PAGE)):
        svg = to_svg(plot.draw(PAGE), plot.name)
    with matplotlib.rc_context(rc(PAPER)):
        figure = plot.draw(PAPER)
        figure.suptitle(plot.title, x=0.02, ha="left", fontsize=10)
        return DrawnPlot(plot, svg, to_png(figure))


def plots(stats: Mapping[str, Any], rows: RowFigures, peaks: DevicePeaks | None) -> list[Plot]:
    """Those that the job has numbers for."""
    found = _latency_plots(rows)
    if stats["timeline"]["end_s"]:
        view = TimelineView(stats["timeline"])
        found += _timeline_plots(stats, view)
        found += _time_plots(stats)
        found += _roofline_plots(stats, view, peaks) if peaks else []
    return found


def inference_seconds(stats: Mapping[str, Any]) -> dict[str, float]:
    """The parts of the time in which the model runs, and the rest: reading, tokenising, writing, waiting."""
    parts = {name: stats["engine_seconds"][key] for key, name in PARTS_OF_INFERENCE.items()}
    return {**parts, "the rest": max(0.0, stats["busy_seconds"] - sum(parts.values()))}


def _latency_plots(rows: RowFigures) -> list[Plot]:
    found = []
    for column, name, title, what, caption in (
        ("ttft_ms", "ttft", "Time to first token", "time to first token", _TTFT),
        ("latency_ms", "latency", "Total latency", "latency of a row", _LATENCY),
    ):
        times = rows.distributions[column]
        if times.count:
            drawing = partial(latency_histogram, milliseconds=times, what=what)
            found.append(Plot("latency", name, title, caption, drawing))
    for name, title, caption, what, labels in (
        ("queue_prefill", "Queue and prefill", _QUEUE, "time of a row", _QUEUE_SERIES),
        ("tbt", "Time between tokens", _TBT, "time between two tokens of a row", _TBT_SERIES),
    ):
        series = [(label, rows.distributions[column]) for column, label in labels.items()]
        if any(distribution.count for _, distribution in series):
            drawing = partial(distribution_functions, series=series, what=what)
            found.append(Plot("latency", name, title, caption, drawing))
    return found


def _timeline_plots(stats: Mapping[str, Any], view: TimelineView) -> list[Plot]:
    most = stats["options"].get("max_num_seqs", {}).get("value")
    blocks = stats["kv_blocks"]["total"]
    return [
        Plot("time", "throughput", "Throughput", _THROUGHPUT, partial(throughput, view=view)),
        Plot("time", "batch_size", "Batch size", _BATCH, partial(batch_size, view=view, most=most)),
        Plot("time", "kv_cache", "KV cache", _KV_CACHE, partial(kv_cache, view=view, num_blocks=blocks)),
        Plot("time", "prompts", "Prefix hits and preemptions", _PROMPTS, partial(prompts, view=view)),
    ]


def _time_plots(stats: Mapping[str, Any]) -> list[Plot]:
    drawing = partial(where_the_time_went, phases=stats["wall_seconds"], inside=inference_seconds(stats))
    return [Plot("work", "where_the_time_went", "Phases of the run", _WHERE, drawing)]


def _roofline_plots(stats: Mapping[str, Any], view: TimelineView, peaks: DevicePeaks) -> list[Plot]:
    intervals = interval_work(stats["work"], stats["timeline"])
    whole = partial(
        roofline,
        intervals=intervals,
        durations_s=view.durations_s,
        run=run_work(stats["work"]),
        run_s=stats["busy_seconds"],
        peaks=peaks,
    )
    over_time = partial(shares_over_time, view=view, intervals=intervals, peaks=peaks)
    return [
        Plot("work", "roofline", "Roofline", _ROOFLINE, whole),
        Plot("work", "roofline_shares", "Shares of the peaks over time", _SHARES, over_time),
    ]


_QUEUE_SERIES = {"ttft_ms": "time to first token", "queue_ms": "queue", "prefill_ms": "prefill"}
_TBT_SERIES = {"tbt_mean_ms": "mean gap", "tbt_p99_ms": "99th percentile", "tbt_max_ms": "longest gap"}
_TTFT = "From when a row enters the waiting queue. The later rows of a queue mostly wait in line."
_LATENCY = "From when a row enters the waiting queue to its last token."
_QUEUE = "Time to first token is the time in the queue and then that of the prefill. The further right, the slower."
_TBT = "Each row's gaps between tokens, pauses after preemptions included: their mean, 99th percentile and maximum."
_THROUGHPUT = (
    "Above, tokens that rows gained; below, all that were computed: prompts, output, and repeats after preemptions."
)
_BATCH = "Sequences in each step, the mean over time, and those in the engine's queue."
_KV_CACHE = "Blocks that running sequences hold. Blocks that only the prefix cache keeps count as free."
_PROMPTS = "Prompts by when their rows started, and sequences that had been put back, by when they started again."
_WHERE = "All phases of the run by the wall clock, and what the phase of inference was spent on."
_ROOFLINE = (
    "Below the slope, memory sets the pace: a step reads all weights, whatever its batch. Under the flat part, "
    "arithmetic does. The distance to the line is what could still be gained."
)
_SHARES = (
    "Of the measured peaks, counting only what the steps must read and compute. “Roofline” is the larger of the two "
    "at each step: the share of the least possible time."
)
