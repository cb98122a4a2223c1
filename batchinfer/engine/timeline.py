"""What a run's steps did over time, in constant memory: intervals of equally many steps that grow with the run. Fed by
EngineStats, shown by report/."""

from typing import Any, NamedTuple

import numpy as np

CAPACITY = 512  # intervals


class StepCounts(NamedTuple):
    """What one step adds to its interval.

    prompt_tokens, cached_prompt_tokens: of the sequences that it starts for the first time, whole prompts. preemptions:
    sequences it starts again after they had been put back. context_tokens: cached tokens that its sequences read, each
    of a sequence once. query_key_pairs: pairs of a computed token and one that it attends to. The last two are of one
    layer, the mean where some attend to a window only.
    """

    scheduled_tokens: int
    output_tokens: int  # sampled
    prompt_tokens: int
    cached_prompt_tokens: int
    preemptions: int
    context_tokens: float
    query_key_pairs: float
    running: int  # sequences in the step
    waiting: int
    kv_blocks: int  # in use


_SUMMED = (
    *("scheduled_tokens", "output_tokens", "prompt_tokens", "cached_prompt_tokens", "preemptions"),
    *("context_tokens", "query_key_pairs"),
)
_AVERAGED = ("running", "waiting", "kv_blocks")
_PEAKED = ("running", "kv_blocks")
_NAMES = StepCounts._fields
_PEAK_PLACES = [_NAMES.index(name) for name in _PEAKED]


class Timeline:
    """At most `capacity` intervals, an even number. Each holds one step until they are full; then they are merged in
    pairs, and each further one takes twice as many steps as before, so that any run fits."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        if capacity < 2 or capacity % 2:
            raise ValueError(f"capacity = {capacity}: must be even, 2 or more")
        self._capacity = capacity
        self._steps_each = 1
        self._num_steps = 0
        self._ends_s = np.zeros(capacity)
        self._sums = np.zeros((capacity, len(_NAMES)))  # exact below 2**53
        self._peaks = np.zeros((capacity, len(_PEAKED)))

    def add(self, end_s: float, counts: StepCounts) -> None:
        """end_s: when the step ended, seconds since the run's start; never less than before."""
        place = self._num_steps // self._steps_each
        if place == self._capacity:
            self._merge_pairs()
            place = self._num_steps // self._steps_each
        values = np.array(counts, np.float64)
        self._ends_s[place] = end_s
        self._sums[place] += values
        np.maximum(self._peaks[place], values[_PEAK_PLACES], out=self._peaks[place])
        self._num_steps += 1

    def to_json(self) -> dict[str, Any]:
        """One list a column, with an entry an interval: end_s (of its last step); steps; sums, named as in StepCounts;
        running, waiting and kv_blocks as `_mean` over its steps, running and kv_blocks as `_peak` too."""
        size = -(-self._num_steps // self._steps_each)
        steps = np.full(size, self._steps_each)
        if size:
            steps[-1] = self._num_steps - (size - 1) * self._steps_each
        sums = dict(zip(_NAMES, self._sums[:size].T, strict=True))
        columns: dict[str, Any] = {"end_s": self._ends_s[:size].round(6), "steps": steps}
        columns |= {name: np.rint(sums[name]).astype(np.int64) for name in _SUMMED}
        columns |= {f"{name}_mean": (sums[name] / steps).round(3) for name in _AVERAGED}
        columns |= {f"{name}_peak": peak.astype(np.int64) for name, peak in zip(_PEAKED, self._peaks.T, strict=True)}
        return {name: column[:size].tolist() for name, column in columns.items()}

    def _merge_pairs(self) -> None:
        half = self._capacity // 2
        self._ends_s[:half] = self._ends_s[1::2]
        self._sums[:half] = self._sums[0::2] + self._sums[1::2]
        self._peaks[:half] = np.maximum(self._peaks[0::2], self._peaks[1::2])
        self._sums[half:] = 0
        self._peaks[half:] = 0
        self._steps_each *= 2
