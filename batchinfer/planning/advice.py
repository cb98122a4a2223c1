"""What would help a job most: the forecast again with one option changed at a time, ranked by the time it saves. Called
by plan.py."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from batchinfer.cache.spec import ELEMENT_BYTES
from batchinfer.config import JobConfig
from batchinfer.errors import UsageError
from batchinfer.executors.cache_size import DEFAULT_SHARE
from batchinfer.planning.forecast import JobShape
from batchinfer.planning.scenario import Scenario
from batchinfer.planning.step_trace import Forecast
from batchinfer.roofline import DevicePeaks
from batchinfer.units import format_exact_bytes

_WORTH_SAYING = 0.02  # of the time or, where that is not known, of the steps
_MOST_SHARE = 0.9  # of free memory that advice asks for
_FOUR_BIT_BYTES = 0.5 + 4 / 128  # a weight, with a 16-bit scale and zero for each 128


def advice(scenario: Scenario, job: JobShape, peaks: DevicePeaks | None) -> list[dict[str, Any]]:
    """Each change that helps, the most helpful first: its `option`, and by which factor it changes `concurrency`,
    `steps` and `time` (None where nothing is known of the device); `basis` says from what the time is known."""
    before = scenario.flow(job, is_rough=True)
    found = []
    for option, changed in _changes(scenario):
        after = changed.flow(job, is_rough=True)
        entry = {
            "option": option,
            "concurrency": _ratio(after.trace.mean_sequences, before.trace.mean_sequences),
            "steps": _ratio(after.trace.steps, before.trace.steps),
            **_time_ratio(scenario, before, changed, after, peaks),
        }
        if _gain(entry) > _WORTH_SAYING:
            found.append(entry)
    return sorted(found, key=_gain, reverse=True)


def _gain(entry: dict[str, Any]) -> float:
    return 1 - (entry["steps"] if entry["time"] is None else entry["time"])


def _time_ratio(
    scenario: Scenario, before: Forecast, changed: Scenario, after: Forecast, peaks: DevicePeaks | None
) -> dict[str, Any]:
    """By what is known of both."""
    old, new = scenario.costs(peaks), changed.costs(peaks)
    for basis in old:
        if basis in new:
            times = new[basis].time(after).middle_s, old[basis].time(before).middle_s
            return {"time": _ratio(*times), "basis": basis}
    return {"time": None, "basis": None}


def _ratio(new: float, old: float) -> float:
    return new / old if old else 1.0


def _changes(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """(what to write on the command line, the job with it) for each change that is possible."""
    for option, change in _option_changes(scenario):
        try:
            yield option, Scenario.make(change(scenario.config), scenario.model)
        except UsageError:  # it does not fit
            continue
    if scenario.model.method == "none" and scenario.config.model.activation_dtype == "auto":
        share = _FOUR_BIT_BYTES / ELEMENT_BYTES[scenario.model.dtype]
        yield "4-bit weights (batchinfer quantize)", scenario.with_weights(share)


def _option_changes(scenario: Scenario) -> Iterator[tuple[str, Callable[[JobConfig], JobConfig]]]:
    cache, scheduler = scenario.config.cache, scenario.config.scheduler
    if scenario.cache.element_bytes > 1:
        yield "--kv-cache-dtype fp8", _cache(kv_cache_dtype="fp8")
    if not cache.enable_prefix_caching:
        yield "--enable-prefix-caching", _cache(enable_prefix_caching=True)
    for name, best in (("batching", "continuous"), ("kv_allocation", "paged"), ("admission", "forecast")):
        if getattr(scheduler, name) != best:
            yield f"--{name.replace('_', '-')} {best}", _scheduler(**{name: best})
    if scheduler.order != "packed":
        yield "--order packed", _scheduler(order="packed")
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        more = 4 * getattr(scheduler, name)
        yield f"--{name.replace('_', '-')} {more}", _scheduler(**{name: more})
    if cache.kv_cache_memory is not None:
        more, free = 2 * cache.kv_cache_memory, scenario.model.free_bytes
        if free is None or scenario.model.sizes.total + more <= _MOST_SHARE * free:
            yield f"--kv-cache-memory {format_exact_bytes(more)}", _cache(kv_cache_memory=more)
    elif scenario.model.device == "cpu" and (cache.gpu_memory_utilization or DEFAULT_SHARE["cpu"]) < _MOST_SHARE:
        yield f"--gpu-memory-utilization {_MOST_SHARE}", _cache(gpu_memory_utilization=_MOST_SHARE)


def _cache(**values: Any) -> Callable[[JobConfig], JobConfig]:
    return lambda config: replace(config, cache=replace(config.cache, **values))


def _scheduler(**values: Any) -> Callable[[JobConfig], JobConfig]:
    return lambda config: replace(config, scheduler=replace(config.scheduler, **values))
