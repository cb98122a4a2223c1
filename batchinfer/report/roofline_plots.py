"""Plots of a run against its device's peaks: the roofline, and shares of bandwidth and arithmetic over time. Used by
figures.py where peaks are known."""

from typing import TYPE_CHECKING, Any

import numpy as np

from batchinfer.report.roofline_shares import Work
from batchinfer.report.theme import Theme, legend_above, new_figure, plain_log_labels
from batchinfer.report.timeline_plots import TimelineView
from batchinfer.roofline import DevicePeaks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def roofline(theme: Theme, intervals: Work, durations_s: Any, run: Work, run_s: float, peaks: DevicePeaks) -> "Figure":
    """Arithmetic reached over arithmetic for each byte, of the timeline's intervals and of the whole run, under the
    roof that the peaks make."""
    figure, (axes,) = new_figure(height_inches=3.4)
    rates = intervals.flops / np.maximum(durations_s, 1e-9)
    ridge = peaks.flops_per_s / peaks.bytes_per_s
    known = [*intervals.intensity, float(run.intensity), ridge]
    low, high = min(known) / 2, max(known) * 4
    x = np.array([low, ridge, high])
    roof = np.minimum(x * peaks.bytes_per_s, peaks.flops_per_s)
    axes.loglog(x, roof / 1e9, color=theme.ink, label="roof: memory, then arithmetic")
    axes.scatter(
        intervals.intensity,
        rates / 1e9,
        s=6 + 60 * durations_s / max(durations_s.max(), 1e-9),
        color=theme.series[0],
        alpha=0.45,
        linewidths=0,
        label="intervals, larger the longer",
    )
    rate = run.flops / run_s
    axes.scatter(
        [run.intensity], [rate / 1e9], s=90, marker="*", color=theme.series[1], zorder=5, label="the whole run"
    )
    axes.set_xlim(low, high)
    axes.set_ylim(min(rates.min(), rate, roof[0]) / 2e9, peaks.flops_per_s / 1e9 * 2)
    plain_log_labels(axes.xaxis)
    plain_log_labels(axes.yaxis)
    axes.set_xlabel("arithmetic for each byte read [FLOP/B]")
    axes.set_ylabel("arithmetic reached [GFLOP/s]")
    axes.legend(loc="lower right")
    axes.grid(which="major")
    return figure


def shares_over_time(theme: Theme, view: TimelineView, intervals: Work, peaks: DevicePeaks) -> "Figure":
    """Shares of both peaks, and of what the roofline allows."""
    figure, axes = new_figure()
    least = view.rate(intervals.least_seconds(peaks))
    axes[0].stairs(least * 100, view.edges, fill=True, color=theme.muted, alpha=0.3, linewidth=0, label="roofline")
    for name, amounts, peak, colour, style in (
        ("arithmetic", intervals.flops, peaks.flops_per_s, theme.series[0], "-"),
        ("memory bandwidth", intervals.bytes, peaks.bytes_per_s, theme.series[1], (0, (3, 1))),
    ):
        share = view.rate(amounts) / peak * 100
        axes[0].stairs(share, view.edges, color=colour, linestyle=style, linewidth=1.4, baseline=None, label=name)
    axes[0].set_ylabel("share reached [%]")
    legend_above(axes[0])
    view.finish(axes)
    highest = float(least.max())
    axes[0].set_ylim(0, min(100.0, 125 * highest) if highest <= 1 else 110 * highest)
    return figure
