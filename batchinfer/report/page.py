"""The page of a finished job: what its template shows, in words. Used by write.py."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from batchinfer.config import iter_options
from batchinfer.report.figures import DrawnPlot
from batchinfer.report.job_files import FinishedJob
from batchinfer.report.roofline_page import job_threads, roofline_context
from batchinfer.report.row_figures import RowFigures
from batchinfer.roofline import DevicePeaks
from batchinfer.units import format_bytes, format_duration, format_exact_bytes, format_ms, format_share

if TYPE_CHECKING:
    from jinja2 import Environment

_MOST_CHARACTERS = 400  # of a user's text that is shown
_MOST_INPUTS = 3
_FORMATS = {"size": format_exact_bytes, "duration": format_duration}  # of options' values
_LAST_RUN = ", last run"  # of a job that took several
_LATENCIES = {
    "ttft_ms": "Time to first token",
    "tbt_ms": "Time between tokens, each gap",
    "tbt_mean_ms": "Time between tokens, mean of a row",
    "tbt_max_ms": "Longest gap of a row",
    "queue_ms": "Queue",
    "latency_ms": "Total latency",
}


class Tile(NamedTuple):
    """A key figure."""

    label: str
    value: str
    note: str = ""


def render(job: FinishedJob, rows: RowFigures, drawn: Sequence[DrawnPlot], peaks: DevicePeaks | None) -> str:
    """The whole page: no script, and nothing that lies elsewhere."""
    environment = _environment()
    stats = job.stats
    times = _times(stats, rows)
    labels = _LATENCIES | ({"tbt_ms": f"{_LATENCIES['tbt_ms']}{_LAST_RUN}"} if stats["rows_resumed"] else {})
    return environment.get_template("page.html").render(
        job=job,
        stats=stats,
        facts=_facts(job),
        tiles=_tiles(stats, times),
        latencies={label: times[name] for name, label in labels.items() if times[name]["max"] is not None},
        plots=drawn,
        errors=_errors(job, rows),
        slowest=[_row(job, row) for row in rows.slowest],
        num_rows=rows.num_rows,
        roofline=roofline_context(stats, peaks),
        options=_options(stats),
        css=environment.get_template("page.css").render(),
    )


def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("batchinfer.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"ms": format_ms, "clipped": _clipped, "count": _count, "rows": _rows}
    return environment


def _facts(job: FinishedJob) -> dict[str, str]:
    stats, shards = job.stats, job.manifest.shards
    inputs = [f"{shard.uri} ({_rows(shard.num_rows)})" for shard in shards[:_MOST_INPUTS]]
    if len(shards) > _MOST_INPUTS:
        inputs.append(f"and {_count(len(shards) - _MOST_INPUTS)} more")
    device = {"cpu": "CPU", "cuda": "GPU"}.get(stats["device"], stats["device"])
    if threads := job_threads(stats):
        device += f", {threads} thread{'s' if threads > 1 else ''}"
    return {
        "Model": str(stats["options"]["model"]["value"] or "SmolLM2-135M-Instruct (the default)"),
        "Device": f"{stats['machine']} ({device})",
        "Input": ", ".join(inputs),
        "Output": job.target,
        "Finished": stats["ended_at"].replace("T", " ").replace("+00:00", " UTC"),
    }


def _times(stats: Mapping[str, Any], rows: RowFigures) -> dict[str, Mapping[str, float | None]]:
    """Mean, percentiles and maximum of _LATENCIES: of all rows, but single gaps, which only the last run knows."""
    return {name: stats[name] if name == "tbt_ms" else rows.distributions[name].summary() for name in _LATENCIES}


def _tiles(stats: Mapping[str, Any], times: Mapping[str, Mapping[str, float | None]]) -> list[Tile]:
    return [*_result_tiles(stats), *_speed_tiles(stats, times), *_machine_tiles(stats)]


def _result_tiles(stats: Mapping[str, Any]) -> list[Tile]:
    reasons = stats["finish_reasons"]
    samples = f"{_count(stats['completions'])} completions" if stats["completions"] != stats["rows"] else ""
    resumed = f"{_count(stats['rows_resumed'])} by earlier runs" if stats["rows_resumed"] else ""
    cached = stats["cached_prompt_tokens"] / max(stats["prompt_tokens"], 1)
    return [
        Tile("Rows", _count(stats["rows"]), ", ".join(filter(None, (samples, resumed)))),
        Tile("Errors", _count(reasons["error"]), f"{reasons['error'] / max(stats['completions'], 1):.2%}"),
        Tile("Ended by themselves", _count(reasons["stop"]), f"{_count(reasons['length'])} at their length"),
        Tile("Prompt tokens", _count(stats["prompt_tokens"]), f"{cached:.1%} from the prefix cache"),
        Tile("Output tokens", _count(stats["completion_tokens"])),
    ]


def _speed_tiles(stats: Mapping[str, Any], times: Mapping[str, Mapping[str, float | None]]) -> list[Tile]:
    last_run = _LAST_RUN if stats["rows_resumed"] else ""
    tiles = [
        Tile("Throughput", f"{stats['output_tokens_per_s']:,.1f}", f"output tokens/s{last_run}"),
        Tile("Total throughput", f"{stats['total_tokens_per_s']:,.1f}", f"tokens/s, prompts included{last_run}"),
    ]
    for name, label in (("ttft_ms", "TTFT"), ("tbt_ms", "TBT"), ("latency_ms", "Latency")):
        figures = times[name]
        tiles.append(Tile(f"{label} p50", format_ms(figures["p50"]), f"p99 {format_ms(figures['p99'])}"))
    return tiles


def _machine_tiles(stats: Mapping[str, Any]) -> list[Tile]:
    batch, blocks = stats["batch_size"], stats["kv_blocks"]
    peak = blocks["peak"] / max(blocks["total"], 1)
    return [
        Tile("Wall time", format_duration(sum(stats["wall_seconds"].values())), _inference_note(stats)),
        Tile("Mean batch", f"{batch['mean']:.1f}", f"{_count(batch['peak'])} at the peak"),
        Tile("KV cache", format_bytes(stats["kv_cache_bytes"]), f"{format_share(peak)} used at the peak"),
        Tile("Preemptions", _count(stats["preemptions"])),
        Tile("Peak memory", format_bytes(stats["peak_memory_bytes"])),
    ]


def _inference_note(stats: Mapping[str, Any]) -> str:
    return f"inference {format_duration(stats['busy_seconds'])}"


def _errors(job: FinishedJob, rows: RowFigures) -> list[dict[str, Any]]:
    """By code, the most frequent first."""
    codes = sorted(rows.error_counts, key=lambda code: (-rows.error_counts[code], code))
    return [
        {
            "code": code,
            "count": rows.error_counts[code],
            "examples": [_row(job, row) for row in rows.error_examples[code]],
        }
        for code in codes
    ]


def _row(job: FinishedJob, row: Mapping[str, Any]) -> dict[str, Any]:
    """With its place in the input: the file, and the row in it from 0."""
    shard, number, sample = (int(part) for part in row["request_id"].split("-"))
    own_id = row["input_id"]
    return {
        **row,
        "file": job.shard_uri(shard).rpartition("/")[2],
        "uri": job.shard_uri(shard),
        "file_row": number,
        "sample": sample,
        "own_id": "" if own_id is None else str(own_id),
    }


def _options(stats: Mapping[str, Any]) -> dict[str, list[tuple[str, str, str]]]:
    """(name, value, source) of those that were chosen, and of the defaults."""
    shown: dict[str, list[tuple[str, str, str]]] = {"chosen": [], "default": []}
    kinds = {member.name: member.metadata["kind"] for _, member in iter_options()}
    for name, option in stats["options"].items():
        group = "default" if option["source"] == "default" else "chosen"
        shown[group].append((name, _value(option["value"], kinds.get(name, "value")), option["source"]))
    return shown


def _value(value: Any, kind: str) -> str:
    """kind: of the option, as in option_field.py."""
    if value is not None and kind in _FORMATS:
        return _FORMATS[kind](value)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "unset" if value is None else str(value)


def _rows(number: int) -> str:
    return f"{_count(number)} row{'' if number == 1 else 's'}"


def _count(number: int) -> str:
    return f"{number:,}"


def _clipped(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
