"""Figures of the steps of a run in constant memory, and the latencies of one request. Fed by the engine; the pipeline
hands them to summary.py."""

import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Series
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.distribution import Distribution
from batchinfer.engine.timeline import StepCounts, Timeline
from batchinfer.request import RequestTimes
from batchinfer.scheduler_output import SchedulerOutput
from batchinfer.sequence import Sequence

IntArray = npt.NDArray[np.int64]
_NOT_FIGURES = ("layers_by_window", "clock", "start_time", "timeline", "tbt_ms")


@dataclass(slots=True)
class EngineStats:
    """Sums over the steps so far. What requests add up to is in their Results.

    layers_by_window: how many layers attend to so many tokens at most, None standing for all.
    """

    kv_blocks_total: int
    layers_by_window: Mapping[int | None, int] = field(default_factory=lambda: {None: 1})
    clock: Callable[[], float] = time.perf_counter
    start_time: float | None = None  # of the clock, when the first step began
    steps: int = 0
    sum_batch_size: int = 0  # sequences, over steps
    peak_batch_size: int = 0
    scheduled_tokens: int = 0
    # Their KV was given up by a preemption and was not in the prefix cache. Booked whole when their sequence starts
    # again; in scheduled_tokens as steps compute them.
    recomputed_tokens: int = 0
    sampled_tokens: int = 0  # confirmed
    scored_tokens: int = 0  # prompt tokens whose logits were computed for their log-probabilities
    context_tokens: float = 0.0  # cached tokens read, over steps and sequences; mean over layers
    query_key_pairs: float = 0.0  # of computed tokens and those that they attend to; mean over layers
    sum_kv_blocks: int = 0  # in use, over steps
    kv_blocks_peak: int = 0
    schedule_s: float = 0.0
    # The next two are of the device: where it runs beside the host, they overlap the others.
    forward_s: float = 0.0  # inputs, forward pass, logits; on a GPU from when it was free for the step
    sample_s: float = 0.0  # tokens, log-probabilities, prompt scores
    postprocess_s: float = 0.0  # commit, stop rules, text, results
    tbt_ms: Distribution = field(default_factory=Distribution)  # each gap between two tokens of a finished sequence
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def mean_batch_size(self) -> float:
        return self.sum_batch_size / max(1, self.steps)

    @property
    def kv_blocks_mean(self) -> float:
        return self.sum_kv_blocks / max(1, self.steps)

    def add_step(self, output: SchedulerOutput, restarts: Series[bool], num_waiting: int, kv_blocks: int) -> None:
        """Called once the step has been submitted, which the timeline takes for its end. restarts: of each started
        sequence, whether it had been put back. kv_blocks: in use."""
        assert self.start_time is not None, "a step is timed from its scheduling on"
        scheduled = output.num_scheduled_tokens.astype(np.int64)
        context_tokens, pairs = attention_work(output.num_computed_tokens, scheduled, self.layers_by_window)
        fresh = [start for start, is_restart in zip(output.started, restarts, strict=True) if not is_restart]
        counts = StepCounts(
            scheduled_tokens=int(scheduled.sum()),
            output_tokens=int(np.count_nonzero(output.samples)),
            prompt_tokens=sum(start.request.num_prompt_tokens for start in fresh),
            cached_prompt_tokens=sum(start.num_computed_tokens for start in fresh),
            preemptions=len(output.started) - len(fresh),
            context_tokens=context_tokens,
            query_key_pairs=pairs,
            running=len(output.slots),
            waiting=num_waiting,
            kv_blocks=kv_blocks,
        )
        self._add(counts)
        self.timeline.add(self.clock() - self.start_time, counts)

    def _add(self, counts: StepCounts) -> None:
        self.steps += 1
        self.sum_batch_size += counts.running
        self.peak_batch_size = max(self.peak_batch_size, counts.running)
        self.scheduled_tokens += counts.scheduled_tokens
        self.context_tokens += counts.context_tokens
        self.query_key_pairs += counts.query_key_pairs
        self.sum_kv_blocks += counts.kv_blocks
        self.kv_blocks_peak = max(self.kv_blocks_peak, counts.kv_blocks)

    def add_token_gaps(self, gaps_ms: npt.NDArray[np.float64]) -> None:
        for gap_ms in gaps_ms.tolist():
            self.tbt_ms.add(gap_ms)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time spent within to the field `name`. The run starts where this is first called."""
        start = self.clock()
        if self.start_time is None:
            self.start_time = start
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + self.clock() - start)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, the gaps as mean, p50, p90, p99 and max, the timeline as lists."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _NOT_FIGURES}
        means = {"mean_batch_size": self.mean_batch_size, "kv_blocks_mean": self.kv_blocks_mean}
        return values | means | {"tbt_ms": self.tbt_ms.summary(), "timeline": self.timeline.to_json()}


def attention_work(
    computed: npt.NDArray[np.int32], scheduled: IntArray, layers_by_window: Mapping[int | None, int]
) -> tuple[float, float]:
    """(cached tokens that a step reads, pairs of a query and a key), both as the mean over layers.

    Sequence i computes its tokens [computed[i], computed[i] + scheduled[i]); each token attends to itself and to those
    before it, a window's number of tokens at most. Its keys and values are read once for all its tokens of the step.
    """
    tokens = pairs = 0.0
    stops = computed + scheduled
    for window, count in layers_by_window.items():
        if window is None:
            tokens += count * int(stops.sum())
            pairs += count * int(scheduled @ (computed + stops + 1)) / 2
        else:
            tokens += count * int(np.minimum(stops, scheduled + window - 1).sum())
            pairs += count * int((_pairs_within(stops, window) - _pairs_within(computed, window)).sum())
    num_layers = sum(layers_by_window.values())
    return tokens / num_layers, pairs / num_layers


def _pairs_within(lengths: npt.NDArray[Any], window: int) -> IntArray:
    """Of the first `lengths` tokens of a sequence with those that they attend to."""
    rising = np.minimum(lengths, window).astype(np.int64)
    return rising * (rising + 1) // 2 + (lengths - rising) * window


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
