"""The forecast of a job as a table for people. Called by the command line with plan_job's figures."""

from collections.abc import Iterator, Mapping
from typing import Any

from batchinfer.executors.cache_size import memory_table
from batchinfer.units import format_bytes, format_duration

_BAR = 40  # characters of the longest bar
_LABEL = 14


def plan_table(figures: Mapping[str, Any]) -> str:
    """Every figure that decides something."""
    parts = (_row_lines, _token_lines, _kv_lines, _memory_lines, _step_lines, _advice_lines)
    return "\n".join(line for part in parts for line in part(figures))


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}".rstrip()


def _row_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    rows, model = figures["rows"], figures["model"]
    quantized = "" if model["quantization"] == "none" else f", {model['quantization']} weights"
    yield _line("model", f"{model['source']}, {model['dtype']}{quantized}")
    is_whole = rows["read"] == rows["total"]
    sampled = "" if is_whole else f"; {rows['read']:,} of them were read, and all counts are scaled from these"
    answered = rows["total"] - rows["errors"]
    completions = f" ({rows['completions']:,} completions)" if rows["completions"] != answered else ""
    yield _line("rows", f"{rows['total']:,}{completions}{sampled}")
    codes = ", ".join(f"{code} {count:,}" for code, count in rows["errors_by_code"].items())
    yield _line("errors", f"{rows['errors']:,}" + (f" ({codes})" if codes else ""))


def _token_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    tokens, prefix = figures["prompt_tokens"], figures["prefix_cache"]
    percentiles = "  ".join(f"{name} {value:,.0f}" for name, value in tokens["percentiles"].items())
    yield _line("prompts", f"{tokens['total']:,} tokens, {tokens['mean']:,.1f} in the mean")
    yield _line("", percentiles)
    most = max((count for *_, count in tokens["histogram"]), default=1)
    width = max((len(f"{stop:,}") for _, stop, _ in tokens["histogram"]), default=1)
    for start, stop, count in tokens["histogram"]:
        bar = "#" * max(1 if count else 0, round(_BAR * count / most))
        yield _line("", f"{start:>{width},} to {stop:>{width},}  {bar:<{_BAR}} {count:,}")
    yield _line("prefix cache", f"can serve {prefix['servable_tokens']:,} prompt tokens, {prefix['share']:.1%}")
    output = figures["output_tokens"]
    yield _line("answers", f"{output['expected']:,} tokens expected, by {output['source']}")


def _kv_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    kv = figures["kv"]
    yield ""
    yield f"KV bytes of a token and of all {kv['job_tokens']:,} tokens of the job ({kv['attention']})"
    for dtype, sizes in kv["bytes_by_dtype"].items():
        mark = "  the options'" if dtype == kv["dtype"] else ""
        yield f"  {dtype:<12}{format_bytes(sizes['per_token']):>10}{format_bytes(sizes['job']):>12}{mark}"
    yield f"in {kv['bytes_by_attention_dtype']}, by the kind of attention in a model of this shape"
    for kind, sizes in kv["bytes_by_attention"].items():
        mark = "  the model's" if kind == kv["attention"] else ""
        yield f"  {kind:<12}{format_bytes(sizes['per_token']):>10}{format_bytes(sizes['job']):>12}{mark}"


def _memory_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield "memory"
    for line in memory_table(figures["memory"]):
        yield f"  {line}"


def _step_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    together, blocks, time = figures["concurrency"], figures["kv_blocks"], figures["time"]
    way = "the scheduler's own" if figures["method"] == "exact" else "estimated as a flow"
    yield ""
    yield _line("steps", f"{figures['steps']:,}, {way}")
    yield _line("batch", f"{together['mean']:.1f} sequences in the mean, {together['peak']:,} at the peak")
    share = blocks["peak"] / max(1, blocks["total"])
    yield _line(
        "KV cache",
        f"{format_bytes(figures['kv_peak_bytes'])} at the peak, {share:.0%} of {blocks['total']:,} blocks; "
        f"{figures['cached_tokens']:,} prompt tokens served",
    )
    again = f", {figures['recomputed_tokens']:,} tokens computed again" if figures["preemptions"] else ""
    yield _line("preemptions", f"{figures['preemptions']:,}{again}")
    if time is None:
        yield _line("time", "not known: nothing was measured on this device; --calibrate measures it")
        return
    rate = time["output_tokens_per_s"]
    yield _line("time", f"{format_duration(time['low_s'])} to {format_duration(time['high_s'])} of inference")
    yield _line("throughput", f"{rate['low']:,.0f} to {rate['high']:,.0f} output tokens/s")
    basis = "steps of this model timed on" if time["basis"] == "calibrated" else "the roofline of"
    yield _line("", f"by {basis} {time['measured_on']}")


def _advice_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    if not figures["advice"]:
        yield "no single option would make it faster"
        return
    yield "what would help most"
    width = max(len(entry["option"]) for entry in figures["advice"])
    for entry in figures["advice"]:
        time = "" if entry["time"] is None else f", time {entry['time'] - 1:+.0%} ({entry['basis']})"
        effects = f"concurrency x{entry['concurrency']:.2f}, steps {entry['steps'] - 1:+.0%}{time}"
        yield f"  {entry['option']:<{width}}  {effects}"
