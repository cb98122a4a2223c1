"""Figures of the steps of a run in constant memory, and the latencies of one request. Fed by the engine; the pipeline
hands them to summary.py."""

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.distribution import Distribution
from batchinfer.request import RequestTimes
from batchinfer.sequence import Sequence


@dataclass(slots=True)
class EngineStats:
    """Sums over the steps so far. What requests add up to is in their Results."""

    kv_blocks_total: int
    steps: int = 0
    sum_batch_size: int = 0  # sequences, over steps
    peak_batch_size: int = 0
    scheduled_tokens: int = 0
    sampled_tokens: int = 0  # confirmed
    sum_kv_blocks: int = 0  # in use, over steps
    kv_blocks_peak: int = 0
    schedule_s: float = 0.0
    forward_s: float = 0.0  # inputs, forward pass, logits
    sample_s: float = 0.0  # tokens, log-probabilities, prompt scores
    postprocess_s: float = 0.0  # commit, stop rules, text, results
    tbt_ms: Distribution = field(default_factory=Distribution)  # each gap between two tokens of a finished sequence

    @property
    def mean_batch_size(self) -> float:
        return self.sum_batch_size / max(1, self.steps)

    @property
    def kv_blocks_mean(self) -> float:
        return self.sum_kv_blocks / max(1, self.steps)

    def add_step(self, batch_size: int, num_tokens: int, kv_blocks: int) -> None:
        self.steps += 1
        self.sum_batch_size += batch_size
        self.peak_batch_size = max(self.peak_batch_size, batch_size)
        self.scheduled_tokens += num_tokens
        self.sum_kv_blocks += kv_blocks
        self.kv_blocks_peak = max(self.kv_blocks_peak, kv_blocks)

    def add_token_gaps(self, gaps_ms: npt.NDArray[np.float64]) -> None:
        for gap_ms in gaps_ms.tolist():
            self.tbt_ms.add(gap_ms)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time spent within to the field `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, the gaps as mean, p50, p90, p99 and max."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        means = {"mean_batch_size": self.mean_batch_size, "kv_blocks_mean": self.kv_blocks_mean}
        return values | means | {"tbt_ms": self.tbt_ms.summary()}


def token_gaps_ms(token_times: "array[float]") -> npt.NDArray[np.float64]:
    """Milliseconds between one token and the next [num_tokens - 1]; token_times in seconds."""
    return np.diff(np.array(token_times, np.float64)) * 1e3


def request_times(sequence: Sequence, gaps_ms: npt.NDArray[np.float64], finish_time: float) -> RequestTimes:
    """The latencies of a finished sequence that has been scheduled; finish_time in seconds of its clock."""
    start, scheduled = sequence.arrival_time, sequence.first_scheduled_time
    assert scheduled is not None
    first = sequence.token_times[0] if sequence.token_times else None
    gaps_ms = np.sort(gaps_ms)
    has_gaps = len(gaps_ms) > 0
    return RequestTimes(
        queue_ms=(scheduled - start) * 1e3,
        prefill_ms=None if first is None else (first - scheduled) * 1e3,
        ttft_ms=None if first is None else (first - start) * 1e3,
        tbt_mean_ms=float(gaps_ms.sum()) / len(gaps_ms) if has_gaps else None,
        tbt_p50_ms=_percentile(gaps_ms, 50) if has_gaps else None,
        tbt_p99_ms=_percentile(gaps_ms, 99) if has_gaps else None,
        tbt_max_ms=float(gaps_ms[-1]) if has_gaps else None,
        latency_ms=(finish_time - start) * 1e3,
    )


def _percentile(rising: npt.NDArray[np.float64], percent: float) -> float:
    """As numpy.percentile's linear method, which takes tens of times as long for a few values."""
    rank = percent / 100 * (len(rising) - 1)
    low = int(rank)
    high = min(low + 1, len(rising) - 1)
    return float(rising[low] + (rising[high] - rising[low]) * (rank - low))
