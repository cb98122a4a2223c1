"""Admission by forecast: a sequence starts where the cache will hold what all running ones are expected to become. Made
by the scheduler, as are the other rules."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchinfer.cache.block_pool import BlockPool
from batchinfer.config import SchedulerConfig
from batchinfer.scheduling.admission import Admission, Greedy, Reservation, TokenIds, cached_blocks
from batchinfer.scheduling.lengths import OutputLengths
from batchinfer.scheduling.running_table import RunningTable, num_tokens_to_compute
from batchinfer.scheduling.usage import Growing, IntArray, Room
from batchinfer.scheduling.waiting_queue import WaitingQueue
from batchinfer.sequence import Sequence

_AIMED_SHARE = 0.005  # of all computed tokens, to be computed again after preemptions
_PRIOR_TOKENS = 20_000  # of work at this share that a job is assumed to come with
_LEAST_CAUTION, _MOST_CAUTION = 2.5, 6.0
_NEVER = np.iinfo(np.int64).max
_RETRY_STEPS = 4  # between two looks at a sequence that had to wait, as long as none has ended
# Candidates whose lengths are drawn together: so many, and at most one to so many running sequences, as the margin is
# that of the running ones.
_MOST_CANDIDATES = 16
_RUNNING_A_CANDIDATE = 8
_UPDATE_STEPS = 16  # length curves are worked out anew at least as often, for the sake of answers that run on and on


@dataclass(slots=True)
class _Outlook:
    """The running sequences as the forecast sees them at this step, and the next candidates. growth: of each candidate,
    as in usage.Growing. blocks_at_ends: held if all running ones were at their ends at once: no peak is higher. room:
    None as long as even that fits."""

    running: tuple[IntArray, IntArray, IntArray]  # num_tokens, growth and uncounted of usage.Growing
    uncertain: npt.NDArray[np.bool_]
    growth: dict[Sequence, int]
    num_available: int  # blocks that running sequences may have alone
    blocks_at_ends: int
    joined: list[tuple[int, int, int]] = field(default_factory=list)  # num_tokens, growth, uncounted
    room: Room | None = None


class Forecast:
    """Starts a sequence if the peak of the blocks held, from now until the last running sequence ends, fits the pool
    with a margin. Lengths are those of OutputLengths, drawn evenly over the running sequences, so that some are
    expected to be short and some long, as they will be. A block counts once, however many share it, and until all of
    them have ended.

    The margin is `caution` standard deviations of what chance adds. caution follows the cost: it rises with the share
    of the work so far that was recomputation. Where max_tokens alone ends answers there is no chance, and no margin.
    """

    def __init__(self, table: RunningTable, pool: BlockPool, lengths: OutputLengths, waiting: WaitingQueue) -> None:
        self._table = table
        self._pool = pool
        self._lengths = lengths
        self._waiting = waiting
        self._outlook: _Outlook | None = None  # at this step; made where it is needed
        self._steps_to_update = _UPDATE_STEPS
        self._refused: tuple[Sequence, int] | None = None  # the last that had to wait, and table.num_changes then
        self._steps_to_retry = 0

    def begin_step(self) -> None:
        self._outlook = None
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
        num_new = pool.num_blocks_for(len(token_ids)) - len(cached)
        fits = num_new <= pool.num_free_blocks
        if fits and not is_alone and not self._fits_anyway(sequence):
            owners = self._table.owners(cached) if num_shared else []
            outlook = self._outlook_for(sequence, num_used, owners)
            fits = self._fits(outlook, len(token_ids), outlook.growth[sequence], num_shared)
        if not fits:
            pool.free(cached)
            self._outlook = None
            self._refused, self._steps_to_retry = (sequence, self._table.num_changes), _RETRY_STEPS
            return None
        return cached + pool.allocate(num_new), len(cached)

    def victim(self) -> Sequence:
        """The sequence whose preemption loses the least computed work, of those that have blocks alone; of several, the
        one admitted last."""
        table = self._table
        slots = table.in_admission_order()[::-1]
        own = table.num_own[slots]
        lost = table.computed[slots] - (table.num_blocks[slots] - own) * table.block_size
        return table.sequence_in(int(slots[np.argmin(np.where(own > 0, lost, _NEVER))]))

    @property
    def caution(self) -> float:
        """Standard deviations kept free."""
        aimed = _AIMED_SHARE * _PRIOR_TOKENS
        share = (self._table.num_recomputed + aimed) / (self._table.num_computed + _PRIOR_TOKENS)
        return min(_LEAST_CAUTION * max(1.0, share / _AIMED_SHARE), _MOST_CAUTION)

    def _fits_anyway(self, sequence: Sequence) -> bool:
        """Whether there is room for all that is allowed, so that nothing need be forecast. Once something was forecast
        in a step, that goes on, as it counts what has joined."""
        most = self._table.most_blocks + self._pool.num_blocks_for(num_tokens_to_compute(sequence))
        return self._outlook is None and most <= self._pool.num_blocks

    def _fits(self, outlook: _Outlook, num_tokens: int, growth: int, num_shared: int) -> bool:
        """Whether a candidate fits beside the running ones and those that have joined; then it has joined, too."""
        if outlook.room is None:
            outlook.blocks_at_ends += self._pool.num_blocks_for(num_tokens + growth) - num_shared
            if outlook.blocks_at_ends <= outlook.num_available:
                outlook.joined.append((num_tokens, growth, num_shared))
                return True
            outlook.room = self._room(outlook)
        return outlook.room.take(num_tokens, growth, num_shared)

    def _room(self, outlook: _Outlook) -> Room:
        """What the running ones and those that have joined leave."""
        size = self._pool.block_size
        growing = Growing(*outlook.running, size)
        ends = np.fromiter(outlook.growth.values(), np.int64, len(outlook.growth))
        moments = np.unique(np.concatenate([outlook.running[1], ends]))
        usage = growing.usage(moments)
        margin = self.caution * growing.spread(usage, outlook.uncertain, self._lengths.num_ended)
        room = Room(moments, outlook.num_available - usage.blocks - margin, size)
        for entry in outlook.joined:
            room.take(*entry)
        return room

    def _outlook_for(self, sequence: Sequence, num_used: int, owners: list[int]) -> _Outlook:
        """num_used: blocks in use, without what acquire() has just referenced. owners: slots that have blocks alone
        which `sequence` would share."""
        if self._outlook is None or owners or sequence not in self._outlook.growth:
            if self._lengths.is_stale or self._steps_to_update <= 0:
                self._table.teach(self._lengths)
                self._steps_to_update = _UPDATE_STEPS
            self._outlook = self._look(num_used, owners)
        return self._outlook

    def _look(self, num_used: int, owners: list[int]) -> _Outlook:
        table, slots = self._table, self._table.in_admission_order()
        candidates = self._waiting.next_ones(min(_MOST_CANDIDATES, 1 + len(slots) // _RUNNING_A_CANDIDATE))
        num_tokens = np.minimum(table.known[slots] + table.in_flight[slots], table.limit[slots])
        growth, is_told = self._growth(slots, candidates)
        own = table.num_own.copy()
        np.subtract.at(own, owners, 1)
        uncounted = (table.num_blocks - own)[slots]
        ends = num_tokens + growth[: len(slots)]
        is_certain = (table.length_class[slots] == 0) | (is_told[: len(slots)] & self._lengths.trusts_earlier_runs)
        return _Outlook(
            (num_tokens, growth[: len(slots)], uncounted),
            ~is_certain,
            dict(zip(candidates, growth[len(slots) :].tolist(), strict=True)),
            self._pool.num_blocks - num_used + int(own[slots].sum()),
            int((-(-ends // self._pool.block_size) - uncounted).sum()),
        )

    def _growth(self, slots: IntArray, candidates: list[Sequence]) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Tokens by which running sequences and then candidates are expected to grow, and whether it is an earlier run
        that tells so."""
        table = self._table
        of_candidates = np.array([_length_facts(candidate) for candidate in candidates], np.int64).reshape(-1, 4)
        of_running = (table.length_class, table.max_tokens, table.expected_tokens)
        facts = [np.concatenate(pair) for pair in zip([f[slots] for f in of_running], of_candidates.T[:3], strict=True)]
        classes, limits, told = facts
        generated = np.concatenate([table.num_generated(slots), of_candidates[:, 3]])
        levels = np.concatenate([table.level[slots], table.next_levels(len(candidates))])
        num_beyond = int(((told >= 0) & (generated > told)).sum())
        is_told = (told > generated) & self._lengths.believes_earlier_runs(num_beyond)
        learnt = self._lengths.remaining(classes, generated, limits, levels)
        remaining = np.where(is_told, told - generated, learnt)
        return np.maximum(remaining - 1, 0), is_told  # the last token is an answer, never an input


def _length_facts(candidate: Sequence) -> tuple[int, int, int, int]:
    """Its class, max_tokens, what an earlier run tells (or -1), and tokens that it has generated."""
    request = candidate.request
    told = -1 if request.expected_tokens is None else request.expected_tokens
    return candidate.length_class, request.max_tokens, told, len(candidate.output_token_ids)


def admission_rule(
    config: SchedulerConfig,
    table: RunningTable,
    pool: BlockPool,
    lengths: OutputLengths,
    waiting: WaitingQueue,
    max_model_len: int | None,
) -> Admission:
    """The rule that the configuration names. max_model_len: what contiguous reservations are made for."""
    if config.reserves:
        if max_model_len is None:
            raise ValueError("max_model_len = None: must be given where kv_allocation is contiguous")
        return Reservation(table, pool, max_model_len)
    return Greedy(table, pool) if config.admission == "greedy" else Forecast(table, pool, lengths, waiting)
