"""Plots of how long rows took: histograms with their percentiles, and distribution functions side by side. Used by
figures.py."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchinfer.distribution import Distribution
from batchinfer.report.scales import histogram, is_wide, shares_below, time_unit
from batchinfer.report.theme import Theme, legend_above, new_figure, plain_log_labels
from batchinfer.units import format_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NUM_BINS = 40
_PERCENTILES = (("p50", 0.5, "-"), ("p90", 0.9, "--"), ("p99", 0.99, ":"))
_LINE_STYLES = ("-", "--", "-.", ":")


def latency_histogram(theme: Theme, milliseconds: Distribution, what: str) -> "Figure":
    """Rows by a time of theirs, of which there is at least one. what: names it on the axis."""
    from matplotlib.ticker import MaxNLocator

    figure, (axes,) = new_figure()
    is_log = is_wide(milliseconds)
    unit_s, unit = time_unit(milliseconds.max / 1e3)
    edges, counts = histogram(milliseconds, _NUM_BINS, is_log)
    axes.stairs(counts, edges / 1e3 / unit_s, fill=True, color=theme.series[0], alpha=0.75, linewidth=0)
    _prepare(axes, is_log, f"{what} [{unit}]")
    axes.set_ylabel("rows")
    axes.set_ylim(0, counts.max() * 1.3)  # room for the labels
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    for place, (label, value_ms, style) in enumerate(_percentile_marks(milliseconds)):
        _mark(axes, theme, value_ms / 1e3 / unit_s, label, style, 0.97 - 0.085 * place)
    return figure


def _percentile_marks(milliseconds: Distribution) -> list[tuple[str, float, str]]:
    """(label, value in ms, line style); percentiles that read alike share one."""
    marks: dict[str, tuple[list[str], float, str]] = {}
    for name, share, style in _PERCENTILES:
        value_ms = milliseconds.percentile(share)
        assert value_ms is not None
        marks.setdefault(format_ms(value_ms), ([], value_ms, style))[0].append(name)
    return [(f"{', '.join(names)} {text}", value_ms, style) for text, (names, value_ms, style) in marks.items()]


def distribution_functions(theme: Theme, series: Sequence[tuple[str, Distribution]], what: str) -> "Figure":
    """The share of rows up to each time, a line for each name; at least one has numbers."""
    figure, (axes,) = new_figure()
    filled = [(name, milliseconds) for name, milliseconds in series if milliseconds.count]
    unit_s, unit = time_unit(max(milliseconds.max for _, milliseconds in filled) / 1e3)
    smallest, largest = _common_range([milliseconds for _, milliseconds in filled])
    is_log = largest > 20 * smallest
    for (name, milliseconds), colour, style in zip(filled, theme.series, _LINE_STYLES, strict=False):
        values, shares = shares_below(milliseconds)
        x = (values.clip(smallest) if is_log else values) / 1e3 / unit_s
        axes.step(x, shares * 100, where="post", color=colour, linestyle=style, label=name)
    _prepare(axes, is_log, f"{what} [{unit}]")
    axes.set_ylabel("rows up to this time [%]")
    axes.set_ylim(0, 102)
    legend_above(axes)
    return figure


def _common_range(distributions: Sequence[Distribution]) -> tuple[float, float]:
    """(smallest, largest) of what an axis must show; next to nothing counts as a thousandth of the largest."""
    largest = max(distribution.max for distribution in distributions)
    smallest = min(distribution.percentile(0.01) or 0.0 for distribution in distributions)
    return max(smallest, largest / 1000), largest


def _prepare(axes: "Axes", is_log: bool, label: str) -> None:
    if is_log:
        axes.set_xscale("log")
        plain_log_labels(axes.xaxis)
    axes.set_xlabel(label)
    axes.grid(axis="y")


def _mark(axes: "Axes", theme: Theme, x: float, label: str, style: str, height: float) -> None:
    """A vertical line with its label beside it, on the side that has room."""
    axes.axvline(x, color=theme.ink, linestyle=style, linewidth=1.1)
    place = axes.transAxes.inverted().transform(axes.transData.transform((x, 0)))[0]
    is_right = place > 0.62
    axes.annotate(
        label,
        (x, height),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if is_right else 4, 0),
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="center",
        color=theme.ink,
        bbox={"boxstyle": "square,pad=0.15", "facecolor": theme.surface, "edgecolor": "none"},
    )
