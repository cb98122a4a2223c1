"""The table of a comparison for a person: one row a variant. Called by cli/bench_compare.py."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from batchinfer.units import format_bytes, format_ms

Entry = Mapping[str, Any]


class _Column(NamedTuple):
    title: str
    text: Callable[[Entry, Entry], str]  # of a variant's entry and of the first's
    is_shown: Callable[[Sequence[Entry]], bool] = lambda entries: True


def comparison_table(comparison: Mapping[str, Any]) -> str:
    """comparison: compare()'s. Medians over the rounds; the spread is the lowest and the highest round."""
    entries: Sequence[Entry] = comparison["variants"]
    columns = [column for column in _COLUMNS if column.is_shown(entries)]
    rows = [[column.title for column in columns]]
    rows += [[column.text(entry, entries[0]) for column in columns] for entry in entries]
    widths = [max(len(row[place]) for row in rows) for place in range(len(columns))]
    return "\n".join(_line(row, widths) for row in rows)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """The first cell stands left, the figures right."""
    padded = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "  ".join([cells[0].ljust(widths[0]), *padded])


def _throughput(entry: Entry, first: Entry) -> str:
    speeds = [run["output_tokens_per_s"] for run in entry["runs"]]
    spread = f" ({min(speeds):,.1f}-{max(speeds):,.1f})" if len(speeds) > 1 else ""
    return f"{entry['output_tokens_per_s']:,.1f}{spread}"


def _ratio(entry: Entry, first: Entry) -> str:
    base = first["output_tokens_per_s"]
    return f"{entry['output_tokens_per_s'] / base:.2f}x" if base else "-"


def _latency(figure: str, name: str) -> Callable[[Entry, Entry], str]:
    return lambda entry, first: format_ms(entry[figure][name])


def _peak_kv(entry: Entry, first: Entry) -> str:
    share = entry["kv_blocks"]["peak"] / max(entry["kv_blocks"]["total"], 1)
    return f"{format_bytes(share * entry['kv_cache_bytes'])} ({share:.0%})"


def _count(name: str) -> Callable[[Entry, Entry], str]:
    return lambda entry, first: f"{entry[name]:,.0f}"


def _differs(name: str) -> Callable[[Sequence[Entry]], bool]:
    return lambda entries: len({entry[name] for entry in entries}) > 1


_COLUMNS = (
    _Column("variant", lambda entry, first: entry["name"]),
    _Column("output tokens/s", _throughput),
    _Column("ratio", _ratio),
    _Column("TTFT p50", _latency("ttft_ms", "p50")),
    _Column("p99", _latency("ttft_ms", "p99")),
    _Column("TBT p50", _latency("tbt_ms", "p50")),
    _Column("p99", _latency("tbt_ms", "p99")),
    _Column("peak KV", _peak_kv),
    _Column("mean batch", lambda entry, first: f"{entry['batch_size']['mean']:.1f}"),
    _Column("preemptions", _count("preemptions")),
    _Column(
        "recomputed tokens",
        _count("recomputed_tokens"),
        lambda entries: any(entry["recomputed_tokens"] for entry in entries),
    ),
    _Column("prompt tokens cached", _count("cached_prompt_tokens"), _differs("cached_prompt_tokens")),
    _Column("tokens in", _count("prompt_tokens"), _differs("prompt_tokens")),
    _Column("tokens out", _count("completion_tokens"), _differs("completion_tokens")),
    _Column("peak memory", lambda entry, first: format_bytes(entry["peak_memory_bytes"])),
    _Column(
        "CPU energy",
        lambda entry, first: f"{entry['energy_joules']:,.0f} J",
        lambda entries: all("energy_joules" in entry for entry in entries),
    ),
)
