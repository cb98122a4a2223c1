"""The least that a run's steps had to read and compute, and which shares of the device's peaks that makes. Pure; used
by the plots and the page."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchinfer.roofline import DevicePeaks


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes and floating-point operations, of the whole run or [num_intervals]."""

    weight_bytes: Any
    kv_bytes: Any
    linear_flops: Any
    logits_flops: Any
    attention_flops: Any

    @property
    def bytes(self) -> Any:
        return self.weight_bytes + self.kv_bytes

    @property
    def flops(self) -> Any:
        return self.linear_flops + self.logits_flops + self.attention_flops

    @property
    def intensity(self) -> Any:
        """Operations for each byte."""
        return self.flops / np.maximum(self.bytes, 1)

    def least_seconds(self, peaks: DevicePeaks) -> Any:
        """Under both roofs, where memory and arithmetic overlap fully."""
        return np.maximum(self.bytes / peaks.bytes_per_s, self.flops / peaks.flops_per_s)


@dataclass(frozen=True, slots=True)
class Shares:
    """Of a device's peaks, each from 0 to 1: mean rates over a time, and the least time of its steps under the roofline
    in that time."""

    seconds: float
    bandwidth: float
    compute: float
    roofline: float


def run_work(work: Mapping[str, Any]) -> Work:
    """work: of _stats.json."""
    return _work(work, work["steps"], work["context_tokens"], work["scheduled_tokens"], work)


def interval_work(work: Mapping[str, Any], timeline: Mapping[str, Any]) -> Work:
    """Of each interval of the timeline. The head runs for the tokens that are sampled; those that --prompt-logprobs
    scores are known for the whole run only, and are left out."""
    columns = {name: np.array(values, np.float64) for name, values in timeline.items()}
    counts = {"logits_tokens": columns["output_tokens"], "query_key_pairs": columns["query_key_pairs"]}
    return _work(work, columns["steps"], columns["context_tokens"], columns["scheduled_tokens"], counts)


def _work(
    unit: Mapping[str, Any], steps: Any, context_tokens: Any, scheduled_tokens: Any, counts: Mapping[str, Any]
) -> Work:
    return Work(
        weight_bytes=steps * unit["weight_bytes"],
        kv_bytes=context_tokens * unit["kv_bytes_per_token"],
        linear_flops=scheduled_tokens * unit["linear_flops_per_token"],
        logits_flops=counts["logits_tokens"] * unit["logits_flops_per_token"],
        attention_flops=counts["query_key_pairs"] * unit["attention_flops_per_pair"],
    )


def shares(stats: Mapping[str, Any], peaks: DevicePeaks, seconds: float) -> Shares:
    """Of the run's work in so many seconds. The least time is the sum over the timeline's intervals, of which some are
    bound by memory and others by arithmetic."""
    whole = run_work(stats["work"])
    least = interval_work(stats["work"], stats["timeline"]).least_seconds(peaks).sum()
    return Shares(
        seconds=seconds,
        bandwidth=whole.bytes / seconds / peaks.bytes_per_s,
        compute=whole.flops / seconds / peaks.flops_per_s,
        roofline=float(least) / seconds,
    )
