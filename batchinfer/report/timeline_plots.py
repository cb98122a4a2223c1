"""Plots of a run over time, from the timeline of _stats.json: throughput, batch, KV cache, prompts, and where the time
went. Used by figures.py."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from batchinfer.report.scales import FloatArray, mean_over, spread, time_edges, time_unit
from batchinfer.report.theme import Theme, legend_above, new_figure
from batchinfer.units import format_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EMPTY_ROW = 0.35  # height of a row of plots that says "none"


class TimelineView:
    """The timeline of at least one step, in equally long spans of the run."""

    def __init__(self, timeline: Mapping[str, Any]) -> None:
        self.columns = {name: np.array(values, np.float64) for name, values in timeline.items()}
        self._end_s = self.columns["end_s"]
        self._edges_s = time_edges(self._end_s)
        self._unit_s, self.unit = time_unit(float(self._end_s[-1]))

    @property
    def edges(self) -> FloatArray:
        """[num_spans + 1], in `unit`."""
        return self._edges_s / self._unit_s

    @property
    def durations_s(self) -> FloatArray:
        """[num_intervals]"""
        return np.diff(self._end_s, prepend=0.0)

    def rate(self, amounts: Any) -> FloatArray:
        """[num_spans] a second, of amounts an interval."""
        return spread(self._end_s, amounts, self._edges_s) / np.diff(self._edges_s)

    def events(self, counts: Any) -> FloatArray:
        """[num_spans] of whole counts an interval, by when it ended."""
        return np.histogram(self._end_s, self._edges_s, weights=counts)[0]

    def mean(self, levels: Any) -> FloatArray:
        """[num_spans] of levels that hold for an interval."""
        return mean_over(self._end_s, levels, self._edges_s)

    def finish(self, axes: "list[Axes]") -> None:
        """The axis of time below, and lines of reference."""
        for one in axes:
            one.grid(axis="y")
            one.set_xlim(0, self.edges[-1])
            one.set_ylim(bottom=0)
        axes[-1].set_xlabel(f"time since the first step [{self.unit}]")


def throughput(theme: Theme, view: TimelineView) -> "Figure":
    """Tokens computed a second, and tokens put out."""
    figure, axes = new_figure(rows=(1.0, 1.0), height_inches=3.4)
    for one, column, colour, label in (
        (axes[0], "output_tokens", theme.series[0], "output\n[tokens/s]"),
        (axes[1], "scheduled_tokens", theme.series[2], "prompt and output\n[tokens/s]"),
    ):
        rates = view.rate(view.columns[column])
        one.stairs(rates, view.edges, fill=True, color=colour, alpha=0.25, linewidth=0)
        one.stairs(rates, view.edges, color=colour, baseline=None)
        one.set_ylabel(label)
        one.yaxis.set_major_formatter(_thousands)
    view.finish(axes)
    return figure


def batch_size(theme: Theme, view: TimelineView, most: int | None) -> "Figure":
    """Sequences in a step, and those that wait. most: that a step may hold."""
    waiting = view.mean(view.columns["waiting_mean"])
    figure, axes = new_figure(rows=(2.0, 1.0 if waiting.any() else _EMPTY_ROW), height_inches=3.4)
    running = view.mean(view.columns["running_mean"])
    axes[0].stairs(running, view.edges, fill=True, color=theme.series[0], alpha=0.25, linewidth=0)
    axes[0].stairs(running, view.edges, color=theme.series[0], baseline=None)
    if most is not None and most <= 1.6 * view.columns["running_peak"].max():
        axes[0].axhline(most, color=theme.muted, linestyle="--", linewidth=1)
        axes[0].annotate(
            f"--max-num-seqs {most}",
            (1, most),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            color=theme.muted,
        )
    axes[0].set_ylabel("running\n[sequences]")
    axes[1].stairs(waiting, view.edges, color=theme.series[1], baseline=None)
    axes[1].set_ylabel("waiting\n[sequences]")
    axes[1].yaxis.set_major_formatter(_thousands)
    view.finish(axes)
    axes[0].set_ylim(0, 1.15 * axes[0].dataLim.y1)
    if waiting.any():
        axes[1].set_ylim(0, max(1.0, axes[1].get_ylim()[1]))
    else:
        _say_none(axes[1], theme, "waiting: none")
    return figure


def kv_cache(theme: Theme, view: TimelineView, num_blocks: int) -> "Figure":
    """The share of the KV cache's blocks that sequences hold."""
    figure, axes = new_figure()
    share = 100 / max(num_blocks, 1)
    used = view.mean(view.columns["kv_blocks_mean"]) * share
    axes[0].stairs(used, view.edges, fill=True, color=theme.series[2], alpha=0.3, linewidth=0)
    axes[0].stairs(used, view.edges, color=theme.series[2], baseline=None, label="mean")
    ends = np.concatenate([[0.0], view.columns["end_s"]]) * (view.edges[-1] / view.columns["end_s"][-1])
    peaks = view.columns["kv_blocks_peak"] * share
    axes[0].stairs(peaks, ends, color=theme.muted, linestyle=":", linewidth=1.2, baseline=None, label="peak")
    axes[0].set_ylabel("blocks in use [%]")
    legend_above(axes[0])
    view.finish(axes)
    axes[0].set_ylim(0, min(105.0, 1.25 * max(share, float(peaks.max()))))  # at least a block
    return figure


def prompts(theme: Theme, view: TimelineView) -> "Figure":
    """Prompt tokens of the sequences that start, computed or served by the prefix cache, and preemptions."""
    preempted = view.events(view.columns["preemptions"])
    figure, axes = new_figure(rows=(2.0, 1.0 if preempted.any() else _EMPTY_ROW), height_inches=3.4)
    cached = view.rate(view.columns["cached_prompt_tokens"])
    whole = view.rate(view.columns["prompt_tokens"])
    axes[0].stairs(whole, view.edges, baseline=cached, fill=True, color=theme.series[0], alpha=0.8, label="computed")
    axes[0].stairs(cached, view.edges, fill=True, color=theme.series[1], alpha=0.8, label="from the prefix cache")
    axes[0].set_ylabel("prompts started\n[tokens/s]")
    axes[0].yaxis.set_major_formatter(_thousands)
    legend_above(axes[0])
    axes[1].stairs(preempted, view.edges, fill=True, color=theme.series[3])
    axes[1].set_ylabel("preemptions")
    axes[1].locator_params(axis="y", integer=True, nbins=3)
    view.finish(axes)
    if not preempted.any():
        _say_none(axes[1], theme, "preemptions: none")
    return figure


def where_the_time_went(theme: Theme, phases: Mapping[str, float], inside: Mapping[str, float]) -> "Figure":
    """Seconds by phase of the whole run, and of the phase in which the model runs. Both have entries."""
    figure, axes = new_figure(rows=(len(phases), len(inside)), height_inches=0.9 + 0.27 * (len(phases) + len(inside)))
    for one, parts, colour, title in (
        (axes[0], phases, theme.series[3], "the whole run"),
        (axes[1], inside, theme.series[0], "inference"),
    ):
        seconds = np.array(list(parts.values()))
        bars = one.barh(list(parts), seconds, color=colour, alpha=0.85, height=0.7)
        total = max(float(seconds.sum()), 1e-9)
        labels = [f"{format_duration(s)}, {s / total:.1%}" for s in parts.values()]
        one.bar_label(bars, labels, padding=2, color=theme.ink)
        one.invert_yaxis()
        one.set_title(title, fontsize=8.5, color=theme.muted)
        one.tick_params(axis="y", length=0)
        one.set_xlim(0, 1.3 * max(max(phases.values()), max(inside.values()), 1e-9))
        one.grid(axis="x")
    axes[-1].set_xlabel("time [s]")
    return figure


def _say_none(axes: "Axes", theme: Theme, text: str) -> None:
    """In place of a plot of nothing but zeros; the axis of time stays."""
    axes.set_yticks([])
    axes.set_ylabel("")
    axes.spines["left"].set_visible(False)
    axes.annotate(text, (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", color=theme.muted)


def _thousands(value: float, _: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"
