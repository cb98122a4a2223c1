"""Prices of steps against sums worked out by hand."""

import numpy as np
import pytest

from batchinfer.models.step_work import StepWork
from batchinfer.planning.step_cost import CalibratedCost, RooflineCost, step_seconds
from batchinfer.planning.step_trace import Forecast, StepTrace
from batchinfer.roofline import DevicePeaks, StepTimes

PEAKS = DevicePeaks(bytes_per_s=1e9, flops_per_s=1e12, measured_on="a device", date="2026-01-31", threads=0)
WORK = StepWork(
    weight_bytes=120_000_000,  # 20 million of them the head's
    kv_bytes_per_token=1000,
    linear_flops_per_token=10**9,
    logits_flops_per_token=10**8,
    attention_flops_per_pair=10**4,
    dtype="bf16",
)
TIMES = StepTimes((1, 100), (0.01, 0.1), 1e-4, 1e-6, 1e-8, 0.03, "a device", "2026-01-31")


def forecast(*steps: tuple[float, ...]) -> Forecast:
    """steps: repeats, sequences, tokens, samples, cache tokens, pairs, blocks."""
    return Forecast(StepTrace(*np.array(steps, np.float64).T), 0, 0, 0, 0, is_exact=True)


def test_a_decode_step_waits_for_memory_and_a_prompt_for_arithmetic() -> None:
    cost = RooflineCost(PEAKS, WORK, head_bytes=20_000_000, num_layers=10)
    decode = 0.1 + 0.02 + 8000 * 1000 / 1e9  # layers, head and keys are read
    prompt = 2000 * 1e9 / 1e12 + 0.02 + 2e6 * 1e4 / 1e12  # products, one row of logits, products again
    found = cost.time(forecast((10, 8, 8, 8, 8000, 8000, 1), (1, 1, 2000, 1, 2000, 2e6, 1)))
    assert found.low_s == pytest.approx(10 * decode + prompt)
    assert found.high_s == pytest.approx(found.low_s / 0.5 + 11 * (1e-3 + 10 * 6e-5))


def test_a_step_that_samples_nothing_reads_no_head() -> None:
    cost = RooflineCost(PEAKS, WORK, head_bytes=20_000_000, num_layers=10)
    found = cost.time(forecast((1, 1, 1, 0, 1, 1, 1)))
    assert found.low_s == pytest.approx(0.1 + 1e-6)


def test_timed_steps_are_interpolated_and_go_on_in_proportion() -> None:
    trace = forecast((1, 1, 1, 1, 10, 10, 1), (1, 1, 34, 0, 0, 0, 1), (1, 1, 300, 0, 0, 1e6, 1)).trace
    assert step_seconds(TIMES, trace) == pytest.approx(
        [0.01 + 1e-4 + 1e-5 + 1e-7, 0.01 + 33 / 99 * 0.09, 3 * 0.1 + 0.01]
    )


@pytest.mark.parametrize(("error", "spread"), [(0.03, 0.25), (0.2, 0.4)])
def test_the_range_of_a_calibrated_time_follows_from_the_fit(error: float, spread: float) -> None:
    times = StepTimes((1, 100), (0.01, 0.1), 1e-4, 1e-6, 1e-8, error, "a device", "2026-01-31")
    found = CalibratedCost(times).time(forecast((5, 1, 1, 0, 0, 0, 1)))
    assert (found.low_s, found.high_s) == pytest.approx((0.05 * (1 - spread), 0.05 * (1 + spread)))
    assert found.middle_s == pytest.approx(0.05)
