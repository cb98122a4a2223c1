"""How many steps a calibration times of a shape, on an engine that only counts."""

from types import SimpleNamespace
from typing import Any

import pytest

from batchinfer.executors import device_profile
from batchinfer.executors.device_profile import _Steps


class CountingEngine:
    """A step computes a token more of each sequence than the one before, and takes as long on the clock as `seconds`
    has it."""

    def __init__(self, seconds: list[float]) -> None:
        self.stats = SimpleNamespace(scheduled_tokens=0, sampled_tokens=0, context_tokens=0, query_key_pairs=0)
        self.now, self._seconds, self.steps = 0.0, seconds, 0

    def step(self) -> None:
        self.now += self._seconds[self.steps]
        self.steps += 1
        self.stats.scheduled_tokens += 4
        self.stats.sampled_tokens += 4
        self.stats.context_tokens += 100 + 4 * self.steps
        self.stats.query_key_pairs += 100 + 4 * self.steps


@pytest.mark.parametrize(
    ("seconds", "num_steps", "middle"),
    [
        ([0.125] * 5 + [9.0], 5, 0.125),  # 0.6 s are full, and so are the fewest
        ([0.25] * 4 + [0.5, 9.0], 5, 0.25),
        ([0.0625] * 3 + [0.125] * 4 + [9.0], 7, 0.125),  # 0.5625 s are not, 0.6875 s are
        ([0.015625] * 20 + [9.0], 20, 0.015625),  # the most
    ],
)
def test_short_steps_are_timed_more_often(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], num_steps: int, middle: float
) -> None:
    engine: Any = CountingEngine(seconds)
    monkeypatch.setattr(device_profile.time, "perf_counter", lambda: engine.now)
    found = _Steps(engine)._timed(5, 20)
    assert engine.steps == num_steps
    assert (found.tokens, found.samples, found.seconds) == (4, 4, middle)
    assert found.cache_tokens == found.pairs == 100 + 4 * (num_steps + 1) / 2
