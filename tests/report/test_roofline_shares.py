"""Work and shares against numbers worked out by hand."""

import pytest
from finished_jobs import TIMELINE, WORK, make_stats

from batchinfer.report.roofline_shares import interval_work, run_work, shares
from batchinfer.roofline import DevicePeaks

PEAKS = DevicePeaks(bytes_per_s=20e9, flops_per_s=500e9, measured_on="a bench", date="2026-01-30", threads=0)


def test_work_of_a_run():
    """4 steps of 1 GB; 2,420 cached tokens of 50 kB; 432 tokens of 2 GFLOP, 40 of 0.1, 102,000 pairs of 0.2 MFLOP."""
    work = run_work(WORK)
    assert (work.weight_bytes, work.kv_bytes) == (4e9, 0.121e9)
    assert (work.linear_flops, work.logits_flops, work.attention_flops) == pytest.approx((864e9, 4e9, 20.4e9))
    assert (work.bytes, work.flops) == pytest.approx((4.121e9, 888.4e9))
    assert work.intensity == pytest.approx(888.4 / 4.121)


def test_work_of_intervals_adds_up_to_the_run():
    intervals, run = interval_work(WORK, TIMELINE), run_work(WORK)
    assert intervals.weight_bytes.tolist() == [1e9, 1e9, 2e9]
    for name in ("weight_bytes", "kv_bytes", "linear_flops", "logits_flops", "attention_flops"):
        assert getattr(intervals, name).sum() == pytest.approx(getattr(run, name)), name


def test_least_seconds_take_the_slower_of_memory_and_arithmetic():
    """First interval: 400 tokens of 2 GFLOP, 8 of 0.1 and 100,000 pairs of 0.2 MFLOP make 820.8 GFLOP in 1.6416 s, and
    1.025 GB would take 0.05125 s. Second: 25.34 GFLOP in 0.05068 s, against 1.031 GB in 0.05155 s. Third: 42.26 GFLOP
    in 0.08452 s, against 2.065 GB in 0.10325 s."""
    least = interval_work(WORK, TIMELINE).least_seconds(PEAKS)
    assert least.tolist() == pytest.approx([1.6416, 0.05155, 0.10325])


def test_shares_of_a_run():
    found = shares(make_stats(), PEAKS, seconds=4.0)
    assert found.bandwidth == pytest.approx(4.121e9 / 4 / 20e9)
    assert found.compute == pytest.approx(888.4e9 / 4 / 500e9)
    assert found.roofline == pytest.approx((1.6416 + 0.05155 + 0.10325) / 4)
