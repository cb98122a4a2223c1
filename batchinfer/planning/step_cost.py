"""Seconds of forecast steps: from a device's roofs, or from what steps of the model took on this machine. Called by
plan.py and advice.py."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from batchinfer.models.step_work import StepWork
from batchinfer.planning.step_trace import FloatArray, Forecast, StepTrace
from batchinfer.roofline import DevicePeaks, StepTimes

# What tuned engines reach of a roofline over whole offline jobs is between 48% and 71% (TensorRT-LLM's published
# figures on an H200 against its datasheet, performance/perf-overview.md); the lower end, and launching, make the range.
TYPICAL_EFFICIENCY = 0.5
STEP_OVERHEAD_S = 1e-3
LAYER_OVERHEAD_S = 6e-5
_LEAST_SPREAD = 0.25  # of a calibrated forecast, either way: machines are shared, and their speed wavers


@dataclass(frozen=True, slots=True)
class TimeRange:
    """Seconds of all steps of a job. basis: "calibrated" or "roofline"."""

    low_s: float
    high_s: float
    basis: str

    @property
    def middle_s(self) -> float:
        return (self.low_s * self.high_s) ** 0.5 if self.basis == "roofline" else (self.low_s + self.high_s) / 2


class StepCost(Protocol):
    """A way to price steps. measured_on: the device in words, with the date."""

    @property
    def measured_on(self) -> str: ...

    def time(self, forecast: Forecast) -> TimeRange: ...


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """Each part of a step takes what the slower of memory and arithmetic takes: the layers' projections, the head's
    product, attention. head_bytes: of work.weight_bytes, those that the head's product reads."""

    peaks: DevicePeaks
    work: StepWork
    head_bytes: int
    num_layers: int

    @property
    def measured_on(self) -> str:
        return f"{self.peaks.measured_on}, {self.peaks.date}"

    def time(self, forecast: Forecast) -> TimeRange:
        trace = forecast.trace
        seconds = float(self._seconds(trace) @ trace.repeats)
        overhead = trace.steps * (STEP_OVERHEAD_S + self.num_layers * LAYER_OVERHEAD_S)
        return TimeRange(seconds, seconds / TYPICAL_EFFICIENCY + overhead, "roofline")

    def _seconds(self, trace: StepTrace) -> FloatArray:
        """Of one step of each entry."""
        work, memory, compute = self.work, self.peaks.bytes_per_s, self.peaks.flops_per_s
        linear_bytes = work.weight_bytes - self.head_bytes
        linear = np.maximum(linear_bytes / memory, work.linear_flops_per_token * trace.tokens / compute)
        head_bytes = np.where(trace.samples > 0, self.head_bytes, 0)
        head = np.maximum(head_bytes / memory, work.logits_flops_per_token * trace.samples / compute)
        attention = np.maximum(
            work.kv_bytes_per_token * trace.cache_tokens / memory,
            work.attention_flops_per_pair * trace.pairs / compute,
        )
        return linear + head + attention


@dataclass(frozen=True, slots=True)
class CalibratedCost:
    """What steps of this model took on this machine, under the same options."""

    times: StepTimes

    @property
    def measured_on(self) -> str:
        return f"{self.times.measured_on}, {self.times.date}"

    def time(self, forecast: Forecast) -> TimeRange:
        trace = forecast.trace
        middle = float(step_seconds(self.times, trace) @ trace.repeats)
        spread = min(0.5, max(_LEAST_SPREAD, 2 * self.times.error))
        return TimeRange(middle * (1 - spread), middle * (1 + spread), "calibrated")


def step_seconds(times: StepTimes, trace: StepTrace) -> FloatArray:
    """Of one step of each entry."""
    counts, seconds = np.array(times.token_counts, np.float64), np.array(times.tokens_s)
    beyond = np.maximum(1.0, trace.tokens / counts[-1])  # larger steps than were timed go on in proportion
    tokens = np.interp(trace.tokens, counts, seconds) * beyond
    return (
        tokens + times.sample_s * trace.samples + times.cache_token_s * trace.cache_tokens + times.pair_s * trace.pairs
    )
