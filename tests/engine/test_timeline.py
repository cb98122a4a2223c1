"""The timeline against a record of every step; attention's work against a loop over tokens and layers."""

import json

import numpy as np
import pytest
from stand_in import make_engine, make_request, run

from batchinfer.engine.stats import attention_work
from batchinfer.engine.timeline import CAPACITY, StepCounts, Timeline

SUMMED = ("scheduled_tokens", "output_tokens", "prompt_tokens", "cached_prompt_tokens", "preemptions")


def random_steps(rng: np.random.Generator, count: int) -> list[StepCounts]:
    rows = rng.integers(0, 1000, (count, len(StepCounts._fields)))
    return [StepCounts(*row) for row in rows.tolist()]


def naive_columns(ends: list[float], steps: list[StepCounts], capacity: int) -> dict[str, list[float]]:
    """From the whole record: the smallest power of two of steps an interval that the capacity allows."""
    each = 1
    while len(steps) > each * capacity:
        each *= 2
    groups = [slice(start, start + each) for start in range(0, len(steps), each)]
    columns = {"end_s": [ends[group][-1] for group in groups], "steps": [len(steps[group]) for group in groups]}
    for name in (*SUMMED, "context_tokens", "query_key_pairs"):
        columns[name] = [sum(getattr(step, name) for step in steps[group]) for group in groups]
    for name in ("running", "waiting", "kv_blocks"):
        columns[f"{name}_mean"] = [np.mean([getattr(step, name) for step in steps[group]]) for group in groups]
    for name in ("running", "kv_blocks"):
        columns[f"{name}_peak"] = [max(getattr(step, name) for step in steps[group]) for group in groups]
    return columns


@pytest.mark.parametrize("seed", range(10))
def test_equals_the_whole_record(seed):
    rng = np.random.default_rng(seed)
    capacity = int(rng.choice([2, 4, 6, 16]))
    steps = random_steps(rng, int(rng.integers(0, 40 * capacity)))
    ends = np.cumsum(rng.exponential(0.1, len(steps))).round(6).tolist()
    timeline = Timeline(capacity)
    for end, step in zip(ends, steps, strict=True):
        timeline.add(end, step)
    columns, expected = timeline.to_json(), naive_columns(ends, steps, capacity)
    assert columns.keys() == expected.keys()
    for name, values in expected.items():
        assert columns[name] == pytest.approx(values, abs=6e-4), name
    assert json.loads(json.dumps(columns, allow_nan=False)) == columns


def test_a_long_run_stays_small():
    timeline = Timeline()
    step = StepCounts(**dict.fromkeys(StepCounts._fields, 7))
    for number in range(3 * CAPACITY + 1):
        timeline.add(float(number), step)
    columns = timeline.to_json()
    assert {len(column) for column in columns.values()} == {3 * CAPACITY // 4 + 1}
    assert columns["steps"] == [4] * (3 * CAPACITY // 4) + [1]
    assert sum(columns["output_tokens"]) == 7 * (3 * CAPACITY + 1)


@pytest.mark.parametrize("capacity", [0, 1, 7])
def test_capacity_must_be_even(capacity):
    with pytest.raises(ValueError, match=f"capacity = {capacity}: must be even"):
        Timeline(capacity)


@pytest.mark.parametrize("seed", range(10))
def test_attention_work_equals_a_loop(seed):
    """Over layers, sequences and the tokens that each computes; a window holds the token itself."""
    rng = np.random.default_rng(seed)
    computed = rng.integers(0, 30, 6).astype(np.int32)
    scheduled = rng.integers(1, 12, 6)
    windows = rng.choice([None, 1, 5, 16, 64], 4).tolist()
    tokens = pairs = 0
    for window in windows:
        for first, count in zip(computed.tolist(), scheduled.tolist(), strict=True):
            seen = set()
            for position in range(first, first + count):
                keys = range(max(0, position + 1 - (window or position + 1)), position + 1)
                pairs += len(keys)
                seen |= set(keys)
            tokens += len(seen)
    layers = {window: windows.count(window) for window in windows}
    assert attention_work(computed, scheduled, layers) == pytest.approx((tokens / 4, pairs / 4))


def test_an_engine_counts_its_steps():
    """Ten tokens of prompt and three out, of which the last is never computed; then the same prompt again, of which two
    blocks of four are cached."""
    ticks = iter(range(1000))
    engine, _ = make_engine(num_blocks=40)
    engine.stats.clock = lambda: float(next(ticks))
    run(engine, [make_request(0, list(range(10)), 3)])
    run(engine, [make_request(1, list(range(10)), 1)])
    columns = engine.stats.timeline.to_json()
    assert columns["scheduled_tokens"] == [10, 1, 1, 2]
    assert columns["output_tokens"] == [1, 1, 1, 1]
    assert columns["prompt_tokens"] == [10, 0, 0, 10]
    assert columns["cached_prompt_tokens"] == [0, 0, 0, 8]
    assert columns["context_tokens"] == [10, 11, 12, 10]
    assert columns["query_key_pairs"] == [55, 11, 12, 9 + 10]
    assert columns["kv_blocks_mean"] == [3, 3, 3, 3]
    assert columns["running_peak"] == [1, 1, 1, 1]
    assert (engine.stats.context_tokens, engine.stats.query_key_pairs) == (43, 97)
    assert columns["end_s"] == sorted(columns["end_s"])
    assert columns["end_s"][0] > 0


def test_preempted_sequences_are_counted_when_they_start_again():
    engine, _ = make_engine(num_blocks=12, max_model_len=40, max_num_seqs=4, admission="greedy")
    requests = [make_request(row, [row] * 9, 25) for row in range(4)]
    results = run(engine, requests)
    columns = engine.stats.timeline.to_json()
    assert sum(columns["preemptions"]) == sum(result.num_preemptions for result in results.values()) > 0
    assert sum(columns["prompt_tokens"]) == 4 * 9
    assert sum(columns["cached_prompt_tokens"]) == sum(r.cached_prompt_tokens for r in results.values())
    assert sum(columns["output_tokens"]) == engine.stats.sampled_tokens == 4 * 25
    assert max(columns["waiting_mean"]) >= 1
    once = sum(9 - result.cached_prompt_tokens + 25 - 1 for result in results.values())  # the last is never computed
    assert engine.stats.recomputed_tokens == engine.stats.scheduled_tokens - once > 0
