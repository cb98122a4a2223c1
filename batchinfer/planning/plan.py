"""`batchinfer plan`: what a job will take, found without loading weights. Called by the command line."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from batchinfer.config import JobConfig
from batchinfer.data.earlier_lengths import EarlierLengths
from batchinfer.data.job_input import JobInput
from batchinfer.data.prompts import PromptBuilder
from batchinfer.data.sampling_defaults import resolve_sampling
from batchinfer.errors import UsageError
from batchinfer.executors.cache_size import memory_budget
from batchinfer.executors.device_profile import calibrate, measure_peaks, threads_of
from batchinfer.models.loader import generation_config
from batchinfer.options import EffectiveOptions
from batchinfer.planning.advice import advice
from batchinfer.planning.forecast import JobShape
from batchinfer.planning.job_rows import JobRows, histogram, read_rows
from batchinfer.planning.kv_forms import ATTENTION_KINDS, KV_DTYPES
from batchinfer.planning.model_facts import ModelFacts, find_model
from batchinfer.planning.scenario import Scenario
from batchinfer.planning.step_trace import Forecast
from batchinfer.roofline import DevicePeaks, load_peaks, nearest_step_times

_PERCENTILES = (0, 10, 50, 90, 99, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is asked beside the job's options. calibrate: time steps of the loaded model first. expected_output_tokens:
    how long answers become of which lengths_from does not tell, else max_tokens."""

    calibrate: bool = False
    expected_output_tokens: int | None = None


def plan_job(options: EffectiveOptions, request: PlanRequest, report: Callable[[str], None]) -> dict[str, Any]:
    """The forecast of a job as JSON types.

    `rows`: `total`, with `errors_by_code`; `read`, of which all counts are scaled to the total; `stride`: one row in so
    many was read. `prompt_tokens`: total, percentiles and `histogram` as [from, to, rows]. `output_tokens`: expected in
    all, and `source`, from what. `prefix_cache`: prompt tokens that it can serve, and their share. `kv`: bytes a token
    and of all rows' tokens, by dtype, of the model's own attention and by kind. `memory`: memory_budget's.
    `concurrency`: sequences that run at once.
    `steps`, `preemptions`, `recomputed_tokens`, `kv_blocks`: as a run counts them; `method`: exact or flow. `time`:
    seconds of inference from low to high, and output tokens/s, None where nothing is known of the device; `basis`, and
    `measured_on`. `advice`: see advice(). Errors as a run's.
    """
    config = options.config
    if request.expected_output_tokens is not None and config.scheduler.lengths_from is not None:
        raise UsageError("--expected-output-tokens and --lengths-from: give one of them")
    job = JobInput.read(config.input, config.sampling.seed, report, config.output.output)
    lengths_from = config.scheduler.lengths_from
    earlier = None if lengths_from is None else EarlierLengths(lengths_from, job.rows)
    if request.calibrate:
        calibrate(config, report)
    model = find_model(config, report)
    scenario = Scenario.make(config, model)
    builder = _builder(config, job, scenario, earlier)
    rows = read_rows(job, builder, config.cache.block_size, request.expected_output_tokens)
    shape = JobShape(rows, model.layers_by_window)
    peaks = find_peaks(config, model, report)
    _tell_of_other_timings(scenario, report)
    forecast = scenario.exact(shape) or scenario.flow(shape)
    return {
        "model": {"source": model.files.source, "dtype": model.dtype, "quantization": model.method},
        "rows": _row_figures(rows),
        "prompt_tokens": _token_figures(rows),
        "output_tokens": {"expected": forecast.output_tokens, "source": _length_source(config, request, rows)},
        "prefix_cache": _prefix_figures(shape),
        "kv": _kv_figures(scenario, rows),
        "memory": _budget(scenario),
        "max_model_len": scenario.size.max_model_len,
        **_step_figures(scenario, forecast),
        "time": _time_figures(scenario, forecast, peaks),
        "advice": advice(scenario, shape, peaks) if rows.num_requests else [],
    }


def find_peaks(config: JobConfig, model: ModelFacts, report: Callable[[str], None]) -> DevicePeaks | None:
    """As kept in the machine's profile for as many threads, else measured on a CPU; None for a GPU of which nothing was
    measured."""
    kept = load_peaks(model.device, model.dtype, threads_of(config, model.device))
    if kept is not None or model.device != "cpu":
        return kept
    report("measuring the memory's bandwidth and the processor's products; --calibrate keeps them")
    return measure_peaks(model.device, model.dtype, config.model.threads)


def _tell_of_other_timings(scenario: Scenario, report: Callable[[str], None]) -> None:
    """Where steps of the model were timed, but under other options than the job will have."""
    key = scenario.profile_key
    found = nearest_step_times(key)
    if found:
        own = {name: key[name] for name in key if any(name in others for others in found)}
        report(
            f"the steps of this model were timed with {' and with '.join(map(_words, found))}, which says nothing of "
            f"{_words(own)}: the time is the roofline's until --calibrate times them with that"
        )


def _words(circumstances: Mapping[str, Any]) -> str:
    """Fields of a profile's key as the options that give them."""
    return " ".join(_option("--" + name.replace("_", "-"), value) for name, value in circumstances.items())


def _option(flag: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag if value else f"--no-{flag[2:]}"
    return f"no {flag}" if value == "" else f"{flag} {value}"


def _builder(
    config: JobConfig, job: JobInput, scenario: Scenario, earlier_lengths: EarlierLengths | None
) -> PromptBuilder:
    """As a run has it."""
    defaults, _ = resolve_sampling(config.sampling, generation_config(scenario.model.files.path))
    model = scenario.model
    of_model = (model.tokenizer, defaults, model.spec.vocab_size, scenario.size.max_model_len)
    return job.builder(config, *of_model, earlier_lengths)


def _row_figures(rows: JobRows) -> dict[str, Any]:
    return {
        "total": rows.num_rows,
        "read": rows.num_read,
        "stride": rows.stride,
        "completions": rows.whole(rows.num_requests),
        "errors": rows.whole(rows.errors.total()),
        "errors_by_code": {code: rows.whole(count) for code, count in sorted(rows.errors.items())},
    }


def _token_figures(rows: JobRows) -> dict[str, Any]:
    counts = np.array(rows.row_tokens, np.int64)
    values = np.percentile(counts, _PERCENTILES).tolist() if len(counts) else [0.0] * len(_PERCENTILES)
    return {
        "total": rows.whole(sum(rows.prompt_tokens)),
        "mean": float(counts.mean()) if len(counts) else 0.0,
        "percentiles": {f"p{share}": value for share, value in zip(_PERCENTILES, values, strict=True)},
        "histogram": [[start, stop, rows.whole(count)] for start, stop, count in histogram(rows.row_tokens)],
    }


def _length_source(config: JobConfig, request: PlanRequest, rows: JobRows) -> str:
    if config.scheduler.lengths_from is not None:
        return f"the answers in {config.scheduler.lengths_from}"
    tokens = request.expected_output_tokens
    if tokens is not None:
        return f"--expected-output-tokens {tokens}"
    early = "; those that end before make the job shorter, which --lengths-from or --expected-output-tokens foresees"
    return "max_tokens of each row" + (early if rows.num_guessed else "")


def _prefix_figures(shape: JobShape) -> dict[str, Any]:
    servable, total = shape.servable_tokens, sum(shape.rows.prompt_tokens)
    return {"servable_tokens": shape.rows.whole(servable), "share": servable / total if total else 0.0}


def _kv_figures(scenario: Scenario, rows: JobRows) -> dict[str, Any]:
    """The job's tokens: those that all rows would hold at once."""
    attention = scenario.model.attention
    tokens = rows.whole(sum(rows.prompt_tokens) + sum(max(0, count - 1) for count in rows.expected_tokens))
    own = {dtype: attention.kv_bytes_per_token(attention.kind, dtype) for dtype in KV_DTYPES}
    own |= {scenario.cache.dtype: scenario.cache.bytes_per_token()}
    kinds = {kind: attention.kv_bytes_per_token(kind, scenario.model.dtype) for kind in ATTENTION_KINDS}
    return {
        "dtype": scenario.cache.dtype,
        "attention": attention.kind,
        "job_tokens": tokens,
        "bytes_per_token": own[scenario.cache.dtype],
        "bytes_by_dtype": {dtype: {"per_token": size, "job": size * tokens} for dtype, size in own.items()},
        "bytes_by_attention": {kind: {"per_token": size, "job": size * tokens} for kind, size in kinds.items()},
        "bytes_by_attention_dtype": scenario.model.dtype,
    }


def _budget(scenario: Scenario) -> dict[str, Any]:
    model, size = scenario.model, scenario.size
    config, cache = scenario.config, scenario.cache
    sizes = (model.sizes.total, model.free_bytes, model.device, cache, size.num_blocks, model.scratch_bytes(config))
    return memory_budget(config, model.spec, *sizes)


def _step_figures(scenario: Scenario, forecast: Forecast) -> dict[str, Any]:
    trace = forecast.trace
    return {
        "method": "exact" if forecast.is_exact else "flow",
        "steps": round(trace.steps),
        "concurrency": {"mean": trace.mean_sequences, "peak": trace.peak_sequences},
        "preemptions": forecast.preemptions,
        "recomputed_tokens": forecast.recomputed_tokens,
        "cached_tokens": forecast.cached_tokens,
        "kv_blocks": {"total": scenario.size.num_blocks, "peak": trace.peak_blocks},
        "kv_peak_bytes": trace.peak_blocks * scenario.cache.bytes_per_block(),
    }


def _time_figures(scenario: Scenario, forecast: Forecast, peaks: DevicePeaks | None) -> dict[str, Any] | None:
    costs = scenario.costs(peaks)
    if not costs:
        return None
    basis, cost = next(iter(costs.items()))
    found = cost.time(forecast)
    tokens = forecast.output_tokens
    rates: Mapping[str, float] = {
        "low": tokens / found.high_s if found.high_s else 0.0,
        "high": tokens / found.low_s if found.low_s else 0.0,
    }
    return {
        "basis": basis,
        "low_s": found.low_s,
        "high_s": found.high_s,
        "middle_s": found.middle_s,
        "output_tokens_per_s": rates,
        "measured_on": cost.measured_on,
        "peaks": None if peaks is None else asdict(peaks),
    }
