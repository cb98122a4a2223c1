"""Admission by forecast: a sequence starts where the cache will hold what all running ones are expected to become. Made
by the scheduler, as are the other rules."""

from dataclasses import dataclass, field

import numpy as np

from batchinfer.cache.block_pool import BlockPool
from batchinfer.cache.block_run import BlockIds
from batchinfer.config import SchedulerConfig
from batchinfer.scheduling.admission import Admission, Greedy, Reservation, TokenIds, cached_blocks, with_new_blocks
from batchinfer.scheduling.lengths import OutputLengths
from batchinfer.scheduling.running_table import RunningTable, length_facts
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
_MOST_CANDIDATES = 32
_RUNNING_A_CANDIDATE = 8
_DRAW_STEPS = 4  # for which the lengths drawn for what runs serve: few sequences outlive theirs meanwhile
_FLAGGED = 1 << 16  # numbers below this are put in order by a flag for each: so many bytes at most
_UPDATE_STEPS = 16  # length curves are worked out anew at least as often, for the sake of answers that run on and on


@dataclass(slots=True)
class _Outlook:
    """The running sequences as the forecast sees them at this step. blocks_at_ends: held if all running ones were at
    their ends at once: no peak is higher. room: None as long as even that fits."""

    running: tuple[IntArray, IntArray, IntArray]  # num_tokens, growth and uncounted of usage.Growing
    slots: IntArray  # theirs
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
        self._ends = np.zeros(len(table.sequences), np.int64)  # tokens of each slot's sequence at its end, as drawn
        self._is_told = np.zeros(len(table.sequences), np.bool_)  # an earlier run tells it
        self._is_any_told = False  # even if it is not believed
        self._candidates: dict[Sequence, int] = {}  # their growth, as in usage.Growing, as drawn
        self._joined: list[tuple[Sequence, int]] = []  # have started since the last look, with their ends
        self._steps_since_draw = _DRAW_STEPS
        self._steps_to_update = _UPDATE_STEPS
        self._refused: tuple[Sequence, int] | None = None  # the last that had to wait, and table.num_changes then
        self._steps_to_retry = 0

    def begin_step(self) -> None:
        self._outlook = None
        self._settle()
        self._steps_since_draw += 1
        self._steps_to_update -= 1
        self._steps_to_retry -= 1

    def acquire(self, sequence: Sequence, token_ids: TokenIds) -> tuple[BlockIds, int] | None:
        is_alone = self._table.num_running == 0
        if self._refused == (sequence, self._table.num_changes) and self._steps_to_retry > 0 and not is_alone:
            return None
        pool = self._pool
        num_free_before = num_free = pool.num_free_blocks
        cached = cached_blocks(pool, sequence, token_ids)
        if len(cached):
            num_free = pool.num_free_blocks
        num_shared = len(cached) - (num_free_before - num_free)
        num_new = pool.num_blocks_for(len(token_ids)) - len(cached)
        fits, end = num_new <= num_free, sequence.num_tokens_to_compute
        if fits and not is_alone and not self._fits_anyway(end):
            # Nobody has alone what more than two hold.
            owners = self._table.owners(pool.held_by_few(cached)[1]) if num_shared else []
            num_used = pool.num_blocks - num_free_before
            fits = self._fits(sequence, len(token_ids), num_shared, num_used, owners)
            end = len(token_ids) + self._candidates[sequence]
        if not fits:
            pool.free(cached)
            self._outlook = None
            self._refused, self._steps_to_retry = (sequence, self._table.num_changes), _RETRY_STEPS
            return None
        self._joined.append((sequence, end))
        return with_new_blocks(pool, cached, num_new), len(cached)

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

    def _fits_anyway(self, num_tokens: int) -> bool:
        """Whether there is room for all that is allowed, so that nothing need be forecast. num_tokens: that a candidate
        may have. Once something was forecast in a step, that goes on, as it counts what has joined."""
        most = self._table.most_blocks + self._pool.num_blocks_for(num_tokens)
        return self._outlook is None and most <= self._pool.num_blocks

    def _fits(self, sequence: Sequence, num_tokens: int, num_shared: int, num_used: int, owners: list[int]) -> bool:
        """Whether a candidate fits beside the running ones and those that have joined; then it has joined, too.
        num_used: blocks in use, without what acquire() has just referenced. owners: slots that have blocks alone which
        the candidate would share."""
        outlook = self._outlook
        if outlook is None or owners or sequence not in self._candidates:
            outlook = self._look(sequence, num_used, owners)
        if outlook.room is None:
            if self._fits_at_ends(outlook, sequence, num_tokens, num_shared):
                return True
            outlook.room = self._room(outlook)
        return outlook.room.take(num_tokens, self._candidates[sequence], num_shared)

    def _fits_at_ends(self, outlook: _Outlook, sequence: Sequence, num_tokens: int, num_shared: int) -> bool:
        growth = self._candidates[sequence]
        outlook.blocks_at_ends += self._pool.num_blocks_for(num_tokens + growth) - num_shared
        fits = outlook.blocks_at_ends <= outlook.num_available
        if fits:
            outlook.joined.append((num_tokens, growth, num_shared))
        return fits

    def _room(self, outlook: _Outlook) -> Room:
        """What the running ones and those that have joined leave."""
        size, slots = self._pool.block_size, outlook.slots
        growing = Growing(*outlook.running, size)
        ends = np.fromiter(self._candidates.values(), np.int64, len(self._candidates))
        moments = _distinct(outlook.running[1], ends)
        usage = growing.usage(moments)
        uncertain = self._table.length_facts[0, slots] != 0
        if self._lengths.trusts_earlier_runs:
            uncertain &= ~self._is_told[slots]
        margin = self.caution * growing.spread(usage, uncertain, self._lengths.num_ended)
        room = Room(moments, outlook.num_available - usage.blocks - margin, size)
        for entry in outlook.joined:
            room.take(*entry)
        return room

    def _settle(self) -> None:
        """Notes the ends of sequences that have started since, now that they have slots."""
        for joined, end in self._joined:
            if joined.slot >= 0:
                self._ends[joined.slot] = end
        self._joined.clear()

    def _look(self, sequence: Sequence, num_used: int, owners: list[int]) -> _Outlook:
        """As of now. sequence: the next to start."""
        table, slots = self._table, self._table.in_admission_order()
        known = table.known[slots] + table.in_flight[slots]
        num_tokens = np.minimum(known, table.limit[slots])
        self._settle()
        if self._steps_since_draw >= _DRAW_STEPS or sequence not in self._candidates:
            self._draw(slots, num_tokens, known - table.num_prompt_tokens[slots])
        ends = np.maximum(self._ends[slots], num_tokens)
        own, num_blocks = table.num_own[slots], table.num_blocks[slots]
        if owners:
            own_of_all = table.num_own.copy()
            np.subtract.at(own_of_all, owners, 1)
            own = own_of_all[slots]
        uncounted = num_blocks - own
        self._outlook = _Outlook(
            (num_tokens, ends - num_tokens, uncounted),
            slots,
            self._pool.num_blocks - num_used + int(own.sum()),
            int((-(-ends // self._pool.block_size) - uncounted).sum()),
        )
        return self._outlook

    def _draw(self, slots: IntArray, num_tokens: IntArray, num_generated: IntArray) -> None:
        """The lengths of the next candidates, and of what runs where those drawn for it are too old."""
        candidates = self._waiting.next_ones(min(_MOST_CANDIDATES, 1 + len(slots) // _RUNNING_A_CANDIDATE))
        if self._steps_since_draw < _DRAW_STEPS and not self._is_any_told:
            slots, num_tokens, num_generated = slots[:0], num_tokens[:0], num_generated[:0]
        else:
            self._steps_since_draw = 0
            if self._lengths.is_stale or self._steps_to_update <= 0:
                self._table.teach(self._lengths)
                self._steps_to_update = _UPDATE_STEPS
        growth = self._growth(slots, num_generated, candidates)
        self._ends[slots] = num_tokens + growth[: len(slots)]
        self._candidates = dict(zip(candidates, growth[len(slots) :].tolist(), strict=True))

    def _growth(self, slots: IntArray, num_generated: IntArray, candidates: list[Sequence]) -> IntArray:
        """Tokens by which running sequences and then candidates are expected to grow."""
        table = self._table
        facts, generated, levels = table.length_facts[:, slots], num_generated, table.level[slots]
        if candidates:
            facts = np.concatenate([facts, np.array([length_facts(c) for c in candidates]).T], axis=1)
            generated = np.concatenate([generated, [len(c.output_tokens) for c in candidates]])
            levels = np.concatenate([levels, table.next_levels(len(candidates))])
        classes, limits, told = facts
        remaining = self._lengths.remaining(classes, generated, limits, levels)
        self._is_any_told = told.max(initial=-1) >= 0
        if self._is_any_told:
            num_beyond = int(((told >= 0) & (generated > told)).sum())
            is_told = (told > generated) & self._lengths.believes_earlier_runs(num_beyond)
            remaining = np.where(is_told, told - generated, remaining)
            self._is_told[slots] = is_told[: len(slots)]
        else:
            self._is_told[slots] = False
        return np.maximum(remaining - 1, 0)  # the last token is an answer, never an input


def _distinct(growth: IntArray, more: IntArray) -> IntArray:
    """All that occur in either, rising."""
    most = max(int(growth.max(initial=0)), int(more.max(initial=0)))
    if most >= _FLAGGED:
        return np.unique(np.concatenate([growth, more]))
    occurs = np.zeros(most + 1, np.bool_)
    occurs[growth] = occurs[more] = True
    return np.flatnonzero(occurs)


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
