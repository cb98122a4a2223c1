"""How many KV blocks running sequences will hold, in closed form, and what room that leaves for others. Pure; used by
forecast.py and by planning/."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
_SHORT = 1 << 16  # numbers below this have 16 bits, by which NumPy sorts in two passes


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
        is_short = int(growth.max(initial=0)) < _SHORT
        rising = np.argsort(growth.astype(np.uint16) if is_short else growth, kind="stable")
        self._rising_growth = growth[rising]
        self._order = np.ascontiguousarray(rising[::-1])
        last = num_tokens[self._order] - 1
        whole = last // block_size
        beyond = (last - whole * block_size).astype(np.int16)
        # Of the first n sequences: blocks held, and how many take another one within so many steps.
        self._held = np.zeros(len(growth) + 1, np.int64)
        np.cumsum(whole + 1 - uncounted[self._order], out=self._held[1:])
        self._crossing = np.zeros((block_size, len(growth) + 1), np.int32)
        crosses = beyond >= block_size - np.arange(block_size, dtype=np.int16)[:, None]
        np.cumsum(crosses, axis=1, out=self._crossing[:, 1:])

    def usage(self, moments: IntArray) -> Usage:
        """At the moments just before those end that end then.

        Sorted by falling growth, those that live to a moment are the first ones: sums over them are cumulative sums.
        With n = q * size + m (m from 1 to size) and t = a * size + b, n + t positions take q + a + 1 blocks, and one
        more where m + b exceeds the size.
        """
        num_alive = len(self._order) - self._rising_growth.searchsorted(moments)
        whole_steps = moments // self._block_size
        steps = moments - whole_steps * self._block_size
        grown = num_alive * whole_steps + self._crossing[steps, num_alive]
        return Usage(self._held[num_alive] + grown, num_alive, grown)

    def spread(self, usage: Usage, uncertain: npt.NDArray[np.bool_], num_seen: int) -> FloatArray:
        """One standard deviation of the blocks, where the sequences that are `uncertain` end at random: the number of n
        that live to a moment at which a share p does is binomial, and each holds about the mean. To it comes what is
        not known of the lengths themselves, as the mean of `num_seen` answers tells them: a relative deviation of
        1 / sqrt(num_seen), for lengths that spread as widely as they are long, of all growth alike."""
        num_uncertain = int(np.count_nonzero(uncertain))
        if num_uncertain == 0:
            return np.zeros(len(usage.blocks))
        alive, num_alive = usage.num_alive, np.maximum(usage.num_alive, 1)
        if num_uncertain < len(uncertain):
            alive = np.concatenate([[0], np.cumsum(uncertain[self._order])])[alive]
        by_chance = np.sqrt(alive * (1 - alive / num_uncertain)) * usage.blocks / num_alive
        by_error = usage.grown * (alive / num_alive) / np.sqrt(1 + num_seen)
        deviation: FloatArray = np.hypot(by_chance, by_error)
        return deviation


class Room:
    """Blocks that running sequences leave at the moments at which they or candidates end: between two endings usage
    only rises, so that what fits then fits always. moments: rising, each candidate's ending among them."""

    def __init__(self, moments: IntArray, blocks: FloatArray, block_size: int) -> None:
        self._moments = moments
        whole = moments // block_size
        # [block_size, moments]: blocks gained by then by a sequence whose last block holds 1, 2, 3, ... tokens now.
        self._gained = whole + (moments - whole * block_size >= block_size - np.arange(block_size)[:, None])
        self._blocks = np.floor(blocks).astype(np.int64)
        self._block_size = block_size

    def take(self, num_tokens: int, growth: int, uncounted: int) -> bool:
        """Takes what a candidate will hold, as in Growing; False, taking nothing, where that does not fit."""
        count = self._moments.searchsorted(growth, side="right")
        whole, beyond = divmod(num_tokens - 1, self._block_size)
        left, held = self._blocks[:count] - self._gained[beyond, :count], whole + 1 - uncounted
        if np.minimum.reduce(left) < held:
            return False
        np.subtract(left, held, out=self._blocks[:count])
        return True
