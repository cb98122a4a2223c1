"""Colours and typography of the plots: real ones for PNG files, and for the page placeholders that become its CSS
variables, so that one drawing serves light and dark. Used by the modules that draw, and by figures.py."""

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

WIDTH_INCHES = 5.0
_RC: Mapping[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.labelpad": 4,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.linewidth": 0.8,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",  # text stays text, in the page's own font
    "svg.hashsalt": "batchinfer",  # the same figures make the same file
    "path.simplify": True,
}


@dataclass(frozen=True, slots=True)
class Theme:
    """series: told apart by readers with any colour vision, in this order."""

    surface: str
    ink: str
    muted: str
    grid: str
    series: tuple[str, str, str, str]


# Okabe and Ito's colours (2008), blue, orange, green and purple.
PAPER = Theme("#ffffff", "#1a2027", "#5b6672", "#e3e7eb", ("#0072b2", "#d55e00", "#009e73", "#aa5f96"))
_VARIABLES = {
    "#a1b000": "--surface",
    "#a1b001": "--ink",
    "#a1b002": "--muted",
    "#a1b003": "--grid",
    "#a1b004": "--blue",
    "#a1b005": "--orange",
    "#a1b006": "--green",
    "#a1b007": "--purple",
}
PAGE = Theme("#a1b000", "#a1b001", "#a1b002", "#a1b003", ("#a1b004", "#a1b005", "#a1b006", "#a1b007"))


def rc(theme: Theme) -> Any:
    """matplotlib's settings, a dict whose keys its own stubs list one by one."""
    colours = {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), theme.surface),
        **dict.fromkeys(("text.color", "legend.labelcolor", "axes.titlecolor"), theme.ink),
        **dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), theme.muted),
        "grid.color": theme.grid,
    }
    return {**_RC, **colours}


def new_figure(height_inches: float = 2.9, rows: tuple[float, ...] = (1.0,)) -> "tuple[Figure, list[Axes]]":
    """A figure of one column of plots that share their x axis. rows: their relative heights."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    options = {"height_ratios": rows, "hspace": 0.08}
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, gridspec_kw=options)[:, 0].tolist()
    return figure, axes


def legend_above(axes: "Axes") -> None:
    """In one line over the plot, where it hides nothing."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=4,
        borderaxespad=0.2,
        borderpad=0,
        handlelength=1.8,
        columnspacing=1.2,
    )


def plain_log_labels(axis: "Axis") -> None:
    """0.01, 1, 100 in place of powers, with labels between them where the axis is short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    is_short = high <= 150 * low
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if is_short else (1.0,), numticks=9))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def to_svg(figure: "Figure", name: str) -> str:
    """An <svg> for a page of HTML. name: makes its ids unique there."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = (
        re.sub(r'\s(?:xmlns|xmlns:xlink|width|height|version)="[^"]*"', "", svg[: svg.index(">")])
        + svg[svg.index(">") :]
    )
    svg = re.sub(r' id="([^"]*)"', rf' id="{name}-\1"', svg)
    svg = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-")
    return re.sub("#a1b00[0-7]", lambda found: f"var({_VARIABLES[found[0]]})", svg)


def to_png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()
