"""The table of `--confirm` in Markdown, as the README shows it. Called by cli/bench_compare.py."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchinfer.units import format_ms

Entry = Mapping[str, Any]
_ARROW = " → "


def confirm_table(confirmed: Mapping[str, Any]) -> str:
    """confirmed: confirm()'s. A row a technique, each cell without it and with it, and the ratio; then the jobs, and
    how far the rounds lie apart."""
    comparisons: Sequence[Mapping[str, Any]] = confirmed["comparisons"]
    header = "| technique | output tokens/s | at once, mean | TTFT p50 | TBT p50 | its own figure |"
    rows = [header, "|---" * header.count(" | ") + "|---|", *map(_row, comparisons)]
    jobs = [f"- {c['technique']}: {c['workload']}; `{c['settings']}`" for c in comparisons]
    return "\n".join([*rows, "", *jobs, "", _spread(confirmed)])


def _row(comparison: Mapping[str, Any]) -> str:
    without, applied = comparison["variants"]
    own = comparison["own_figure"]
    cells = [
        comparison["technique"],
        _cell([entry["output_tokens_per_s"] for entry in (without, applied)], "{:,.0f}".format),
        _cell([entry["batch_size"]["mean"] for entry in (without, applied)], "{:.1f}".format),
        _cell([entry["ttft_ms"]["p50"] for entry in (without, applied)], format_ms),
        _cell([entry["tbt_ms"]["p50"] for entry in (without, applied)], format_ms),
        f"{own['name']}: " + _with_ratio(own["values"], own["texts"]),
    ]
    return "| " + " | ".join(cells) + " |"


def _cell(values: Sequence[float | None], text: Callable[[Any], str]) -> str:
    return _with_ratio(values, [text(value) for value in values])


def _with_ratio(values: Sequence[float | None], texts: Sequence[str]) -> str:
    """ "100 → 210 (2.10x)"; without the ratio where there is none."""
    without, applied = values
    ratio = f" ({applied / without:.2f}x)" if without and applied is not None else ""
    return _ARROW.join(texts) + ratio


def _spread(confirmed: Mapping[str, Any]) -> str:
    if confirmed["rounds"] == 1:
        return f"{confirmed['model']}; one round."
    entries = [entry for comparison in confirmed["comparisons"] for entry in comparison["variants"]]
    farthest = max(
        abs(run["output_tokens_per_s"] / entry["output_tokens_per_s"] - 1) for entry in entries for run in entry["runs"]
    )
    return (
        f"{confirmed['model']}; medians of {confirmed['rounds']} rounds, of which the farthest lies {farthest:.0%} "
        "from its median in output tokens/s."
    )
