"""What the page says of a run against its device's peaks. Used by page.py."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from batchinfer.report.roofline_shares import Work, run_work, shares
from batchinfer.roofline import DevicePeaks, machine_name
from batchinfer.units import format_duration


class Line(NamedTuple):
    """A quantity of the run: its amount, its rate over inference and over the model's part of it."""

    label: str
    amount: str
    rates: tuple[str, ...]


def roofline_context(stats: Mapping[str, Any], peaks: DevicePeaks | None) -> dict[str, Any]:
    """For the template: the table's lines, and either the peaks or what to do to know them."""
    seconds = _seconds(stats)
    if not stats["work"]["steps"]:
        return {"has_steps": False}
    return {
        "has_steps": True,
        "columns": [(name, format_duration(value)) for name, value in seconds.items()],
        "lines": _lines(stats, list(seconds.values()), peaks),
        "peaks": None if peaks is None else _peaks(peaks),
        "advice": _advice(stats, peaks),
    }


def job_threads(stats: Mapping[str, Any]) -> int | None:
    """With which the job ran, 0 on a GPU; None in outputs of versions that did not say."""
    threads: int | None = stats.get("threads")
    return threads


def _seconds(stats: Mapping[str, Any]) -> dict[str, float]:
    parts = stats["engine_seconds"]
    return {"in inference": stats["busy_seconds"], "in the model": parts["forward"] + parts["sample"]}


def _lines(stats: Mapping[str, Any], seconds: list[float], peaks: DevicePeaks | None) -> list[Line]:
    work = run_work(stats["work"])
    lines = [
        Line("Weights read", f"{work.weight_bytes / 1e9:,.1f} GB", _rates(work.weight_bytes, seconds, "GB/s")),
        Line("Keys and values read", f"{work.kv_bytes / 1e9:,.1f} GB", _rates(work.kv_bytes, seconds, "GB/s")),
        Line(
            "Layers' products", f"{work.linear_flops / 1e12:,.2f} TFLOP", _rates(work.linear_flops, seconds, "GFLOP/s")
        ),
        Line(
            "Head's products", f"{work.logits_flops / 1e12:,.2f} TFLOP", _rates(work.logits_flops, seconds, "GFLOP/s")
        ),
        Line(
            "Attention", f"{work.attention_flops / 1e12:,.2f} TFLOP", _rates(work.attention_flops, seconds, "GFLOP/s")
        ),
    ]
    return lines + (_share_lines(stats, work, seconds, peaks) if peaks else [])


def _share_lines(stats: Mapping[str, Any], work: Work, seconds: list[float], peaks: DevicePeaks) -> list[Line]:
    found = [shares(stats, peaks, value) for value in seconds]
    least_s = found[0].roofline * found[0].seconds
    return [
        Line("Share of bandwidth", f"{work.bytes / 1e9:,.1f} GB", tuple(f"{s.bandwidth:.1%}" for s in found)),
        Line("Share of arithmetic", f"{work.flops / 1e12:,.2f} TFLOP", tuple(f"{s.compute:.1%}" for s in found)),
        Line("Share of the roofline", f"≥ {format_duration(least_s)}", tuple(f"{s.roofline:.1%}" for s in found)),
    ]


def _rates(amount: float, seconds: list[float], unit: str) -> tuple[str, ...]:
    return tuple(f"{amount / value / 1e9:,.1f} {unit}" for value in seconds)


def _peaks(peaks: DevicePeaks) -> str:
    return (
        f"{peaks.bytes_per_s / 1e9:,.1f} GB/s and {peaks.flops_per_s / 1e9:,.0f} GFLOP/s, measured on "
        f"{peaks.measured_on}, {peaks.date}"
    )


def _advice(stats: Mapping[str, Any], peaks: DevicePeaks | None) -> str:
    here = machine_name(stats["device"])
    if stats["machine"] != here:
        return f"The job ran on {stats['machine']} and this page was made on {here}, whose peaks say nothing about it."
    if peaks is None:
        return "The peaks of this machine have not been measured."
    if (threads := job_threads(stats)) not in (None, peaks.threads):
        return f"The job ran with --threads {threads}, and the peaks were measured with --threads {peaks.threads}."
    activations = stats["options"].get("activation_dtype", {}).get("value")
    if activations in ("int8", "fp8"):
        layers = f"The products of the layers ran in {activations}"
        return layers + ", which may go beyond a peak of arithmetic in another precision."
    return ""
