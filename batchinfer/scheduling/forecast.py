"""Admission by forecast: a sequence starts where the cache will hold what all running ones are expected to become. Made
by the scheduler, as are the other rules."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchinfer.cache.block_pool import BlockPool
from batchinfer.config import SchedulerConfig
from batchinfer.scheduling.admission import Admission, Greedy, Reservation, TokenIds, cached_blocks
from batchinfer.scheduling.lengths import OutputLengths
from batchinfer.scheduling.running_table import RunningTable
from batchinfer.sequence import Sequence

IntArray = npt.NDArray[np.int64]

_AIMED_SHARE = 0.005  # of all computed tokens, to be computed again after preemptions
_PRIOR_TOKENS = 20_000  # of work at this share that a job is assumed to come with
_LEAST_CAUTION, _MOST_CAUTION = 1.0, 4.0
_NEVER = np.iinfo(np.int64).max
_RETRY_STEPS = 4  # between two looks at a sequence that had to wait, as long as none has ended
_UPDATE_STEPS = 16  # length curves are worked out anew at least as often, for the sake of answers that run on and on


class Usage(NamedTuple):
    """Blocks held at the moments before sequences end; the last to end comes first."""

    blocks: IntArray  # [num_seqs] in use just before this one ends, by all that end with it or later
    order: IntArray  # [num_seqs] which sequence ends then


def usage_before_endings(num_tokens: IntArray, growth: IntArray, uncounted: IntArray, block_size: int) -> Usage:
    """Sequence i holds num_tokens[i] >= 1 positions now, gains one a step for growth[i] steps and then gives all back;
    of its blocks, the first uncounted[i] are counted elsewhere.

    Usage rises between two endings, so that its peak is the largest of `blocks`. Sorted by falling growth, those that
    live to the j-th ending are the first j: sums over them are cumulative sums. With n = q * size + m (m from 1 to
    size) and t = a * size + b, n + t positions take q + a + 1 blocks, and one more where m + b exceeds the size.
    """
    order = np.argsort(-growth, kind="stable")
    whole, last = np.divmod(num_tokens[order] - 1, block_size)
    whole_steps, steps = np.divmod(growth[order], block_size)
    crossing = np.cumsum(last[:, None] + 1 > block_size - np.arange(block_size), axis=0)  # by m and b
    rank = np.arange(len(order))
    held = np.cumsum(whole + 1 - uncounted[order])
    return Usage(held + (rank + 1) * whole_steps + crossing[rank, steps], order)


def spread_of_usage(usage: Usage, uncertain: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """One standard deviation of the blocks, where the sequences that are `uncertain` end at random: the number of n
    that live to a moment at which a share p does is binomial, and each holds about the mean."""
    alive = np.cumsum(uncertain[usage.order])
    share = alive / max(1, int(alive[-1]))
    deviation: npt.NDArray[np.float64] = np.sqrt(alive * (1 - share)) * usage.blocks / np.arange(1, len(alive) + 1)
    return deviation


@dataclass(slots=True)
class _Running:
    """The running sequences as the forecast sees them, one entry each."""

    num_tokens: IntArray
    growth: IntArray
    uncounted: IntArray  # blocks that are shared, and counted in `base`
    uncertain: npt.NDArray[np.bool_]
    base: int  # blocks in use that no running sequence has alone
    at_ends: int  # blocks if all were at their ends at once: no peak is higher

    def joined_by(self, num_tokens: int, growth: int, uncounted: int, uncertain: bool, blocks: int) -> "_Running":
        """With one more, which holds that many blocks at its end."""
        return _Running(
            np.append(self.num_tokens, num_tokens),
            np.append(self.growth, growth),
            np.append(self.uncounted, uncounted),
            np.append(self.uncertain, uncertain),
            self.base,
            self.at_ends + blocks,
        )


class Forecast:
    """Starts a sequence if the peak of the blocks held, from now until the last running sequence ends, fits the pool
    with a margin. Lengths are those of OutputLengths, drawn evenly over the running sequences, so that some are
    expected to be short and some long, as they will be. A block counts once, however many share it, and until all of
    them have ended.

    The margin is `caution` standard deviations of what chance adds. caution follows the cost: it rises with the share
    of the work so far that was recomputation. Where max_tokens alone ends answers there is no chance, and no margin.
    """

    def __init__(self, table: RunningTable, pool: BlockPool, lengths: OutputLengths) -> None:
        self._table = table
        self._pool = pool
        self._lengths = lengths
        self._running: _Running | None = None  # at this step; made where it is needed
        self._steps_to_update = _UPDATE_STEPS
        self._refused: tuple[Sequence, int] | None = None  # the last that had to wait, and table.num_changes then
        self._steps_to_retry = 0

    def begin_step(self) -> None:
        self._running = None
        self._steps_to_update -= 1
        self._steps_to_retry -= 1

    def acquire(self, sequence: Sequence, token_ids: TokenIds) -> tuple[list[int], int] | None:
        is_alone = self._table.num_running == 0
        if self._refused == (sequence, self._table.num_changes) and self._steps_to_retry > 0 and not is_alone:
            return None
        pool = self._pool
        num_used = pool.num_used_blocks
        cached = cached_blocks(pool, sequence, token_ids)
        num_shared = len(cached) - (pool.num_used_blocks - num_used)
        if num_shared and self._table.share([block for block in cached if pool.ref_count(block) > 1]):
            self._running = None
        with_it = self._join(self._current(num_used), sequence, len(token_ids), num_shared)
        num_new = pool.num_blocks_for(len(token_ids)) - len(cached)
        fits = num_new <= pool.num_free_blocks and (is_alone or self._fits(with_it))
        if not fits:
            pool.free(cached)
            self._refused, self._steps_to_retry = (sequence, self._table.num_changes), _RETRY_STEPS
            return None
        self._running = with_it
        return cached + pool.allocate(num_new), len(cached)

    def victim(self) -> Sequence:
        """The sequence whose preemption loses the least computed work, of those that have blocks alone; of several, the
        one admitted last."""
        table = self._table
        slots = table.in_admission_order()[::-1]
        own = table.num_own[slots]
        lost = table.computed[slots] - (table.num_blocks[slots] - own) * table.block_size
        sequence = table.sequences[int(slots[np.argmin(np.where(own > 0, lost, _NEVER))])]
        assert sequence is not None
        return sequence

    @property
    def caution(self) -> float:
        """Standard deviations kept free."""
        aimed = _AIMED_SHARE * _PRIOR_TOKENS
        share = (self._table.num_recomputed + aimed) / (self._table.num_computed + _PRIOR_TOKENS)
        return min(max(share / _AIMED_SHARE, _LEAST_CAUTION), _MOST_CAUTION)

    def _fits(self, running: _Running) -> bool:
        if running.at_ends + running.base <= self._pool.num_blocks:
            return True
        usage = usage_before_endings(running.num_tokens, running.growth, running.uncounted, self._pool.block_size)
        margin = self.caution * spread_of_usage(usage, running.uncertain) if running.uncertain.any() else 0
        return bool((usage.blocks + margin).max() + running.base <= self._pool.num_blocks)

    def _current(self, num_used: int) -> _Running:
        """num_used: blocks in use, without what acquire() has just referenced."""
        if self._running is None:
            self._update_lengths()
            self._running = self._look(num_used)
        return self._running

    def _update_lengths(self) -> None:
        if self._lengths.is_stale or self._steps_to_update <= 0:
            self._table.teach(self._lengths)
            self._steps_to_update = _UPDATE_STEPS

    def _look(self, num_used: int) -> _Running:
        table, slots = self._table, self._table.in_admission_order()
        num_tokens = np.minimum(table.known[slots] + table.in_flight[slots], table.limit[slots])
        generated, classes = table.num_generated(slots), table.length_class[slots]
        remaining = self._lengths.remaining(classes, generated, table.max_tokens[slots], table.level[slots])
        growth = np.maximum(remaining - 1, 0)  # the last token is an answer, never an input
        uncounted = table.num_blocks[slots] - table.num_own[slots]
        at_ends = int((-(-(num_tokens + growth) // self._pool.block_size) - uncounted).sum())
        base = num_used - int(table.num_own[slots].sum())
        return _Running(num_tokens, growth, uncounted, classes > 0, base, at_ends)

    def _join(self, running: _Running, sequence: Sequence, num_tokens: int, num_shared: int) -> _Running:
        length_class = self._lengths.class_of(sequence.request)
        generated = num_tokens - sequence.num_prompt_tokens
        remaining = self._lengths.remaining(
            np.array([length_class]),
            np.array([generated]),
            np.array([sequence.request.max_tokens]),
            np.array([self._table.next_level]),
        )
        growth = max(0, int(remaining[0]) - 1)
        blocks = self._pool.num_blocks_for(num_tokens + growth) - num_shared
        return running.joined_by(num_tokens, growth, num_shared, length_class > 0, blocks)


def admission_rule(
    config: SchedulerConfig, table: RunningTable, pool: BlockPool, lengths: OutputLengths, max_model_len: int | None
) -> Admission:
    """The rule that the configuration names. max_model_len: what contiguous reservations are made for."""
    if config.reserves:
        if max_model_len is None:
            raise ValueError("max_model_len = None: must be given where kv_allocation is contiguous")
        return Reservation(table, pool, max_model_len)
    return Greedy(table, pool) if config.admission == "greedy" else Forecast(table, pool, lengths)
