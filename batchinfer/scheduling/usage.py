"""How many KV blocks running sequences will hold, in closed form, and what room that leaves for others. Pure; used by
forecast.py and by planning/."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class Usage(NamedTuple):
    """At given moments, one entry each. num_alive: sequences that end then or later."""

    blocks: IntArray
    num_alive: IntArray
    grown: IntArray  # of the blocks, those that are not held now


class Growing:
    """Sequence i holds num_tokens[i] >= 1 positions now, gains one a step for growth[i] steps and then gives all back;
    of its blocks, the first uncounted[i] are counted elsewhere. Moments are steps from now."""

    def __init__(self, num_tokens: IntArray, growth: IntArray, uncounted: IntArray, block_size: int) -> None:
        self._block_size = block_size
        self._order = np.argsort(growth, kind="stable")[::-1]
        self._rising_growth = growth[self._order][::-1]
        last = num_tokens[self._order] - 1
        whole = last // block_size
        self._held = np.cumsum(whole + 1 - uncounted[self._order])
        crosses = last - whole * block_size >= block_size - np.arange(block_size)[:, None]
        self._crossing = np.cumsum(crosses, axis=1, dtype=np.int32)  # [block_size, sequences]

    def usage(self, moments: IntArray) -> Usage:
        """At the moments just before those end that end then.

        Sorted by falling growth, those that live to a moment are the first ones: sums over them are cumulative sums.
        With n = q * size + m (m from 1 to size) and t = a * size + b, n + t positions take q + a + 1 blocks, and one
        more where m + b exceeds the size.
        """
        num_alive = len(self._order) - np.searchsorted(self._rising_growth, moments)
        if not len(self._order):
            return Usage(*np.zeros((3, len(moments)), np.int64))
        whole_steps = moments // self._block_size
        steps = moments - whole_steps * self._block_size
        last = num_alive - 1
        held = np.where(num_alive > 0, self._held[last], 0)
        grown = np.where(num_alive > 0, num_alive * whole_steps + self._crossing[steps, last], 0)
        return Usage(held + grown, num_alive, grown)

    def spread(self, usage: Usage, uncertain: npt.NDArray[np.bool_], num_seen: int) -> FloatArray:
        """One standard deviation of the blocks, where the sequences that are `uncertain` end at random: the number of n
        that live to a moment at which a share p does is binomial, and each holds about the mean. To it comes what is
        not known of the lengths themselves, as the mean of `num_seen` answers tells them: a relative deviation of
        1 / sqrt(num_seen), for lengths that spread as widely as they are long, of all growth alike."""
        among = np.concatenate([[0], np.cumsum(uncertain[self._order])])
        alive = among[usage.num_alive]
        share = alive / max(1, int(among[-1]))
        by_chance = np.sqrt(alive * (1 - share)) * usage.blocks / np.maximum(usage.num_alive, 1)
        by_error = usage.grown * (alive / np.maximum(usage.num_alive, 1)) / np.sqrt(1 + num_seen)
        deviation: FloatArray = np.hypot(by_chance, by_error)
        return deviation


class Room:
    """Blocks that running sequences leave at the moments at which they or candidates end: between two endings usage
    only rises, so that what fits then fits always. moments: rising, each candidate's ending among them."""

    def __init__(self, moments: IntArray, blocks: FloatArray, block_size: int) -> None:
        self._moments = moments
        self._blocks = np.floor(blocks).astype(np.int64)
        self._block_size = block_size

    def take(self, num_tokens: int, growth: int, uncounted: int) -> bool:
        """Takes what a candidate will hold, as in Growing; False, taking nothing, where that does not fit."""
        count = int(np.searchsorted(self._moments, growth, side="right"))
        left = self._blocks[:count] - ((self._moments[:count] + (num_tokens - 1)) // self._block_size + (1 - uncounted))
        if left.min() < 0:
            return False
        self._blocks[:count] = left
        return True
