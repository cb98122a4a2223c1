"""Request and run statistics to the figures of _stats.json, and the table shown at the end of a job. Used by the
pipeline; pure, no torch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchinfer.distribution import Distribution
from batchinfer.request import RequestTimes, Result
from batchinfer.units import format_bytes, format_duration, format_ms, format_share

if TYPE_CHECKING:
    from batchinfer.data.result_schema import Tally

_COUNTS = ("rows", "completions", "prompt_tokens", "cached_prompt_tokens", "completion_tokens")
_TIMES = ("queue_ms", "ttft_ms", "tbt_mean_ms", "tbt_max_ms", "latency_ms")


class RequestStatistics:
    """What the results of a run add up to, in memory that does not grow with them."""

    def __init__(self) -> None:
        self.rows = 0
        self.completions = 0
        self.finish_reasons: Counter[str] = Counter()
        self.error_codes: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.completion_tokens = 0
        self.preemptions = 0
        self._times = {name: Distribution() for name in _TIMES}

    @property
    def errors(self) -> int:
        """Results with finish_reason "error"."""
        return self.finish_reasons["error"]

    def add(self, result: Result) -> None:
        """Rows are counted by their first sample; an error row has no tokens and no times."""
        self.rows += result.id.sample == 0
        self.completions += 1
        self.finish_reasons[result.finish_reason] += 1
        if result.error_code is not None:
            self.error_codes[str(result.error_code)] += 1
        if result.finish_reason == "error":
            return
        self.prompt_tokens += result.prompt_tokens or 0
        self.cached_prompt_tokens += result.cached_prompt_tokens or 0
        self.completion_tokens += result.completion_tokens or 0
        self.preemptions += result.num_preemptions or 0
        if result.times is not None:
            self._add_times(result.times)

    def to_json(self) -> dict[str, Any]:
        """Each `*_ms` entry is over the results: mean, p50, p90, p99 and max of the column of that name."""
        return {
            "rows": self.rows,
            "completions": self.completions,
            "finish_reasons": {reason: self.finish_reasons[reason] for reason in ("stop", "length", "error")},
            "errors_by_code": dict(sorted(self.error_codes.items())),
            "prompt_tokens": self.prompt_tokens,
            "cached_prompt_tokens": self.cached_prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "preemptions": self.preemptions,
            **{name: times.summary() for name, times in self._times.items()},
        }

    def _add_times(self, times: RequestTimes) -> None:
        for name, distribution in self._times.items():
            value: float | None = getattr(times, name)
            if value is not None:
                distribution.add(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Of the process and the job as a whole."""

    rows_resumed: int  # rows answered by earlier runs of the same job
    phase_seconds: Mapping[str, float]  # wall time by phase, in their order
    busy_seconds: float  # from the first tokenisation to the last detokenisation
    peak_memory_bytes: int
    kv_cache_bytes: int
    device: str
    versions: Mapping[str, str]
    options: Mapping[str, Any]  # EffectiveOptions.to_json()


def summarise(requests: RequestStatistics, engine: Mapping[str, Any], run: RunFigures) -> dict[str, Any]:
    """The content of _stats.json and of `bench throughput --json`; JSON types only. `engine` is LocalEngine.figures().

    Throughput counts the tokens of rows without error over `busy_seconds`; cached prompt tokens count in the total.
    `timeline` is Timeline.to_json(). `work` is what the steps read and computed at least, each count with what one of
    it takes; the counts are those of StepCounts.
    """
    total_tokens = requests.prompt_tokens + requests.completion_tokens
    return {
        **requests.to_json(),
        "recomputed_tokens": engine["recomputed_tokens"],
        "rows_resumed": run.rows_resumed,
        "output_tokens_per_s": _rate(requests.completion_tokens, run.busy_seconds),
        "total_tokens_per_s": _rate(total_tokens, run.busy_seconds),
        "tbt_ms": engine["tbt_ms"],
        "wall_seconds": dict(run.phase_seconds),
        "busy_seconds": run.busy_seconds,
        "engine_seconds": {name.removesuffix("_s"): value for name, value in engine.items() if name.endswith("_s")},
        "steps": engine["steps"],
        "batch_size": {"mean": engine["mean_batch_size"], "peak": engine["peak_batch_size"]},
        "kv_blocks": {name: engine[f"kv_blocks_{name}"] for name in ("total", "peak", "mean")},
        "work": _work(engine),
        "kv_cache_bytes": run.kv_cache_bytes,
        "peak_memory_bytes": run.peak_memory_bytes,
        "device": run.device,
        "machine": engine["machine"],
        "threads": engine["threads"],
        "ended_at": engine["ended_at"],
        "versions": dict(run.versions),
        "options": dict(run.options),
        "timeline": engine["timeline"],
    }


def _work(engine: Mapping[str, Any]) -> dict[str, Any]:
    counts = {name: engine[name] for name in ("steps", "scheduled_tokens", "context_tokens", "query_key_pairs")}
    return {**counts, "logits_tokens": engine["sampled_tokens"] + engine["scored_tokens"], **engine["step_work"]}


def with_earlier_runs(stats: Mapping[str, Any], before: "Tally") -> dict[str, Any]:
    """The figures with the counts of what earlier runs answered added. `of_all_runs` names them, `this_run` holds
    them without; all other figures stay of this run, throughput too: its own tokens over its own time."""
    errors = Counter(stats["errors_by_code"]) + before.errors
    reasons = {name: count + before.finish_reasons[name] for name, count in stats["finish_reasons"].items()}
    totals = {
        **{name: stats[name] + getattr(before, name) for name in _COUNTS},
        "finish_reasons": reasons,
        "errors_by_code": dict(sorted(errors.items())),
    }
    return {**stats, **totals, "of_all_runs": list(totals), "this_run": {name: stats[name] for name in totals}}


def summary_table(stats: Mapping[str, Any], output: str | None = None) -> str:
    """The end of a job for a person: one line a figure. `stats` is `summarise`'s; `output` is where the files are. Of a
    job that took several runs the counts of all come first, and what the last run did and took below them."""
    lines = {"rows": _rows_line(stats), "errors": _errors_line(stats), "tokens": _tokens_line(stats)}
    if stats["rows_resumed"]:
        lines["this run"] = f"{stats['this_run']['rows']:,} rows, {_tokens_line(stats['this_run'])}; all below is of it"
    lines |= {
        "throughput": f"{stats['output_tokens_per_s']:,.1f} output tokens/s, {stats['total_tokens_per_s']:,.1f} in all",
        "time": _time_line(stats),
        "TTFT": _latency_line(stats["ttft_ms"]),
        "TBT": _latency_line(stats["tbt_ms"]),
        "latency": _latency_line(stats["latency_ms"]),
        "batch": f"{stats['batch_size']['mean']:.1f} sequences in the mean, {stats['batch_size']['peak']} at the peak",
        "KV cache": _cache_line(stats),
        "peak memory": format_bytes(stats["peak_memory_bytes"]),
    }
    if "agreement_tokens_mean" in stats:
        lines["agreement"] = _agreement_line(stats)
    if output is not None:
        lines["output"] = output
    return "\n".join(f"{name:<13}{text}" for name, text in lines.items())


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _rows_line(stats: Mapping[str, Any]) -> str:
    resumed = f", of which earlier runs answered {stats['rows_resumed']:,}" if stats["rows_resumed"] else ""
    samples = f" ({stats['completions']:,} completions)" if stats["completions"] != stats["rows"] else ""
    return f"{stats['rows']:,}{samples}{resumed}"


def _errors_line(stats: Mapping[str, Any]) -> str:
    codes = ", ".join(f"{code} {count:,}" for code, count in stats["errors_by_code"].items())
    return f"{stats['finish_reasons']['error']:,}" + (f" ({codes})" if codes else "")


def _tokens_line(stats: Mapping[str, Any]) -> str:
    cached = stats["cached_prompt_tokens"]
    return f"{stats['prompt_tokens']:,} in ({cached:,} cached), {stats['completion_tokens']:,} out"


def _time_line(stats: Mapping[str, Any]) -> str:
    return ", ".join(f"{phase} {format_duration(seconds)}" for phase, seconds in stats["wall_seconds"].items())


def _latency_line(figures: Mapping[str, float | None]) -> str:
    return "  ".join(f"{name} {format_ms(figures[name])}" for name in ("p50", "p90", "p99", "max"))


def _agreement_line(stats: Mapping[str, Any]) -> str:
    tokens, seconds = stats["agreement_tokens_mean"], format_duration(stats["agreement_seconds"])
    return f"{tokens:.1f} tokens in the mean before the first difference to float32 (found in another {seconds})"


def _cache_line(stats: Mapping[str, Any]) -> str:
    blocks = stats["kv_blocks"]
    return (
        f"{format_bytes(stats['kv_cache_bytes'])}, {format_share(blocks['peak'] / max(blocks['total'], 1))} of "
        f"{blocks['total']:,} blocks used at the peak, {stats['preemptions']:,} preemptions"
    )
