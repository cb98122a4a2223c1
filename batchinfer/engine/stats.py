"""Figures of a run in constant memory, and the latencies of one request. Fed by the engine; summary.py turns them into
_stats.json."""

import math
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.request import RequestTimes
from batchinfer.sequence import Sequence

_GROWTH = 1.02  # of a bucket's upper bound over its lower one: percentiles are within 1%
_LOWEST, _HIGHEST = 1e-3, 1e9  # values outside count in the outermost buckets


class Histogram:
    """Counts of positive values in logarithmic buckets; percentiles within 1%, sum and extremes exact."""

    def __init__(self) -> None:
        self._counts = np.zeros(math.ceil(math.log(_HIGHEST / _LOWEST) / math.log(_GROWTH)) + 1, np.int64)
        self.count = 0
        self.sum = 0.0
        self.min = math.inf
        self.max = -math.inf

    def add(self, values: npt.NDArray[np.float64]) -> None:
        if not len(values):
            return
        buckets = np.log(np.maximum(values, _LOWEST) / _LOWEST) / math.log(_GROWTH)
        np.add.at(self._counts, np.minimum(buckets.astype(np.int64), len(self._counts) - 1), 1)
        self.count += len(values)
        self.sum += float(values.sum())
        self.min = min(self.min, float(values.min()))
        self.max = max(self.max, float(values.max()))

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None

    def percentile(self, percent: float) -> float | None:
        """The value of rank ceil(percent / 100 * count); None without values."""
        if not self.count:
            return None
        rank = max(1, math.ceil(percent / 100 * self.count))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        middle = _LOWEST * _GROWTH ** (bucket + 0.5)
        return min(max(middle, self.min), self.max)

    def to_dict(self) -> dict[str, float | int | None]:
        percentiles = {f"p{p}": self.percentile(p) for p in (50, 90, 99)}
        return {"count": self.count, "mean": self.mean, **percentiles, "max": self.max if self.count else None}


@dataclass(slots=True)
class EngineStats:
    """Sums over steps and finished requests. Times in seconds where named _s, latencies in milliseconds."""

    kv_blocks_total: int
    num_steps: int = 0
    sum_batch_size: int = 0  # sequences a step
    peak_batch_size: int = 0
    scheduled_tokens: int = 0
    sum_kv_blocks_used: int = 0  # a step
    peak_kv_blocks_used: int = 0
    schedule_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    postprocess_s: float = 0.0
    num_finished: int = 0
    num_errors: int = 0
    prompt_tokens: int = 0  # the request figures are over requests without error
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    queue_ms: Histogram = field(default_factory=Histogram)
    ttft_ms: Histogram = field(default_factory=Histogram)
    tbt_ms: Histogram = field(default_factory=Histogram)
    latency_ms: Histogram = field(default_factory=Histogram)

    @property
    def mean_batch_size(self) -> float:
        return self.sum_batch_size / max(1, self.num_steps)

    @property
    def mean_kv_blocks_used(self) -> float:
        return self.sum_kv_blocks_used / max(1, self.num_steps)

    def add_step(self, batch_size: int, num_tokens: int, kv_blocks_used: int) -> None:
        self.num_steps += 1
        self.sum_batch_size += batch_size
        self.peak_batch_size = max(self.peak_batch_size, batch_size)
        self.scheduled_tokens += num_tokens
        self.sum_kv_blocks_used += kv_blocks_used
        self.peak_kv_blocks_used = max(self.peak_kv_blocks_used, kv_blocks_used)

    def add_sequence(self, sequence: Sequence, times: RequestTimes) -> None:
        """A sequence that ended without error."""
        self.num_finished += 1
        self.prompt_tokens += sequence.num_prompt_tokens
        self.cached_prompt_tokens += sequence.num_cached_tokens
        self.completion_tokens += len(sequence.output_token_ids)
        self.preemptions += sequence.num_preemptions
        self.queue_ms.add(np.array([times.queue_ms]))
        self.latency_ms.add(np.array([times.latency_ms]))
        if times.ttft_ms is not None:
            self.ttft_ms.add(np.array([times.ttft_ms]))
        self.tbt_ms.add(token_gaps_ms(sequence.token_times))

    def add_error(self, sequence: Sequence | None) -> None:
        """A request that failed; sequence: None where it never ran."""
        self.num_finished += 1
        self.num_errors += 1
        self.preemptions += sequence.num_preemptions if sequence else 0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time spent within to the field `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, the histograms as count, mean, p50, p90, p99 and max."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain = {name: v.to_dict() if isinstance(v, Histogram) else v for name, v in values.items()}
        return plain | {"mean_batch_size": self.mean_batch_size, "mean_kv_blocks_used": self.mean_kv_blocks_used}


def token_gaps_ms(token_times: "array[float]") -> npt.NDArray[np.float64]:
    """Milliseconds between one token and the next [num_tokens - 1]; token_times in seconds."""
    return np.diff(np.array(token_times, np.float64)) * 1e3


def request_times(sequence: Sequence, finish_time: float) -> RequestTimes:
    """The latencies of a finished sequence; finish_time in seconds, time.monotonic."""
    start = sequence.arrival_time
    scheduled = finish_time if sequence.first_scheduled_time is None else sequence.first_scheduled_time
    queue_ms = (scheduled - start) * 1e3
    first = sequence.token_times[0] if sequence.token_times else None
    gaps = np.sort(token_gaps_ms(sequence.token_times))
    has_gaps = len(gaps) > 0
    return RequestTimes(
        queue_ms=queue_ms,
        prefill_ms=None if first is None else (first - scheduled) * 1e3,
        ttft_ms=None if first is None else (first - start) * 1e3,
        tbt_mean_ms=float(gaps.sum()) / len(gaps) if has_gaps else None,
        tbt_p50_ms=_percentile(gaps, 50) if has_gaps else None,
        tbt_p99_ms=_percentile(gaps, 99) if has_gaps else None,
        tbt_max_ms=float(gaps[-1]) if has_gaps else None,
        latency_ms=(finish_time - start) * 1e3,
    )


def _percentile(rising: npt.NDArray[np.float64], percent: float) -> float:
    """As numpy.percentile's linear method, which takes a hundred times as long for a few values."""
    rank = percent / 100 * (len(rising) - 1)
    low = int(rank)
    high = min(low + 1, len(rising) - 1)
    return float(rising[low] + (rising[high] - rising[low]) * (rank - low))
