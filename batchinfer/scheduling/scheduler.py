"""Decides what each step computes. The one rule: every running sequence's num_computed_tokens catches up with its
num_tokens under a token budget. Called by the engine as schedule() -> (the step runs) -> commit()."""

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from batchinfer.cache.block_pool import BlockPool
from batchinfer.cache.block_run import BlockIds
from batchinfer.config import SchedulerConfig
from batchinfer.request import FinishReason, Request
from batchinfer.scheduler_output import SchedulerOutput, StartedSequence, StepResult
from batchinfer.scheduling.batching import Batching, Continuous, Static
from batchinfer.scheduling.faults import trace_faults
from batchinfer.scheduling.forecast import admission_rule
from batchinfer.scheduling.lengths import FloatArray, OutputLengths
from batchinfer.scheduling.running_table import IntArray, RunningTable, Start, known_tokens
from batchinfer.scheduling.steps import StepInFlight, StepOutcome
from batchinfer.scheduling.waiting_queue import WaitingQueue
from batchinfer.sequence import Sequence, SequenceStatus


class Scheduler:
    """Running sequences first, those with one token to compute ahead of longer chunks; then waiting ones, first come
    first served, a prompt in chunks as the budget allows. A sequence is admitted, by the rule that the configuration
    names, with the blocks of all its known tokens; later ones are taken one by one, and where none is left a sequence
    of the rule's choice is preempted: it keeps its tokens, loses its KV and waits at the head of the queue.

    Up to `max_steps_in_flight` steps may be scheduled before the first is committed; commits come in the order of
    schedule. What steps in flight still read, blocks and slots, is given back when they are committed. A preempted
    sequence whose token is in flight starts again once that token is committed, so a StartedSequence's tokens are
    always known.

    Full blocks of prompts are shared from the moment that a scheduled step will write them, with sequences of that same
    step too: in each layer, a step stores the keys and values of its whole batch before any attention reads them. Those
    of answers become findable when a sequence leaves its slot: prompts are known before answers, so that hardly one
    begins with an answer.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_pool: BlockPool,
        max_steps_in_flight: int = 1,
        clock: Callable[[], float] = time.monotonic,
        max_model_len: int | None = None,
    ) -> None:
        if max_steps_in_flight < 1:
            raise ValueError(f"max_steps_in_flight = {max_steps_in_flight}: must be 1 or more")
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_steps_in_flight = max_steps_in_flight
        self._pool = block_pool
        self._block_size = block_pool.block_size
        self._shares_blocks = block_pool.enable_prefix_caching and not config.reserves
        self._clock = clock
        self._table = RunningTable(config.max_num_seqs, block_pool.block_size, block_pool.num_blocks)
        self._waiting = WaitingQueue()
        self._lengths = OutputLengths()
        self._admission = admission_rule(config, self._table, block_pool, self._lengths, self._waiting, max_model_len)
        self._batching: Batching = Static(config.max_num_seqs) if config.batching == "static" else Continuous()
        self._steps: deque[StepInFlight] = deque()
        self._next_step_id = 0
        self._last_committed = -1
        self._retiring: list[int] = []  # slots that steps in flight still read
        self._released_slots: list[int] = []  # free since the last SchedulerOutput

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return self._table.num_running

    @property
    def num_recomputed_tokens(self) -> int:
        """See RunningTable.num_recomputed."""
        return self._table.num_recomputed

    @property
    def has_unfinished(self) -> bool:
        return len(self._waiting) > 0 or self._table.num_running > 0

    def expected_output_tokens(self, requests: list[Request]) -> FloatArray:
        """How long the answers to requests that have not begun are likely to be, by those seen so far."""
        self._table.teach(self._lengths)
        return self._lengths.expected(requests)

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence at the end of the waiting queue. Raises ValueError where the whole pool could not hold
        it, because no preemption would ever let it finish."""
        needed = self._pool.num_blocks_for(sequence.num_tokens_to_compute)
        if needed > self._pool.num_blocks:
            raise ValueError(
                f"request {sequence.request.id}: {sequence.max_num_tokens} tokens need {needed} KV blocks of "
                f"{self._block_size}, the cache has {self._pool.num_blocks}"
            )
        sequence.length_class = self._lengths.class_of(sequence.request)
        self._waiting.append(sequence)

    def schedule(self) -> SchedulerOutput | None:
        """The next step; None where nothing can run before a commit, or before more is added."""
        if len(self._steps) == self._max_steps_in_flight:
            return None
        slots, counts, missing = self._plan_running()
        appended = self._table.append_blocks(slots, missing, self._pool.allocate(int(missing.sum())))
        self._table.advance(slots, counts, self._next_step_id)
        for slot in slots[counts > 1].tolist():  # prompts; blocks of an answer can wait until it leaves its slot
            self._register_full_blocks(slot)
        admitted = self._admit(self._max_num_batched_tokens - int(counts.sum()))
        if admitted:
            slots = np.concatenate([slots, np.array([start.slot for start, _ in admitted], np.int64)])
            counts = np.concatenate([counts, np.array([count for _, count in admitted], np.int64)])
        if not len(slots):
            return None
        return self._emit(slots, counts, tuple(start for start, _ in admitted), appended)

    def _plan_running(self) -> tuple[IntArray, IntArray, IntArray]:
        """Slots, token counts and the blocks that each lacks, after the preemptions that these take."""
        while True:
            slots, counts = self._table.plan(self._max_num_batched_tokens)
            missing = self._table.blocks_missing(slots, counts)
            num_free = self._pool.num_free_blocks
            if int(missing.sum()) <= num_free:
                return slots, counts, missing
            if self._retiring:  # their blocks come back at the next commits; until then, run what fits
                fits = (missing == 0) | (np.cumsum(missing) <= num_free)
                return slots[fits], counts[fits], missing[fits]
            self._preempt(self._admission.victim())

    def _admit(self, budget: int) -> list[tuple[StartedSequence, int]]:
        """Starts waiting sequences; returns them with the tokens they compute in this step."""
        admitted = []
        self._admission.begin_step()
        while budget > 0 and self._table.has_free_slot and (sequence := self._next_to_start()) is not None:
            started = self._try_start(sequence, budget)
            if started is None:
                self._batching.close()
                break
            self._waiting.pop_head()
            self._batching.started(sequence)
            admitted.append(started)
            budget -= started[1]
        return admitted

    def _next_to_start(self) -> Sequence | None:
        if not self._waiting:
            self._batching.close()
        sequence = self._waiting.head()
        joins = sequence is not None and self._batching.may_join(sequence, self._table.num_running)
        return sequence if joins else None

    def _try_start(self, sequence: Sequence, budget: int) -> tuple[StartedSequence, int] | None:
        """The sequence in its slot, and how many tokens it computes in this step; None where it must wait."""
        token_ids = known_tokens(sequence)
        acquired = self._admission.acquire(sequence, token_ids)
        if acquired is None:
            return None
        blocks, num_cached_blocks = acquired
        num_cached_tokens = num_cached_blocks * self._block_size
        count = min(len(token_ids) - num_cached_tokens, budget)
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = self._clock()
            sequence.num_cached_tokens = num_cached_tokens
            sequence.output_tokens = sequence.output_tokens[:]  # made now, it lies beside those of its batch in memory
        sequence.status = SequenceStatus.RUNNING
        held = self._pool.held_by_few(blocks[:num_cached_blocks])
        start = Start(sequence, token_ids, blocks, num_cached_tokens, count, *held)
        slot = self._table.place(start, self._next_step_id)
        self._register(sequence, blocks, num_cached_blocks, (num_cached_tokens + count) // self._block_size)
        return StartedSequence(slot, sequence.request, token_ids, blocks, num_cached_tokens), count

    def _emit(
        self,
        slots: IntArray,
        counts: IntArray,
        started: tuple[StartedSequence, ...],
        appended: IntArray,
    ) -> SchedulerOutput:
        samples, scored = self._table.take_completions(slots)
        stops = self._table.computed[slots]
        output = SchedulerOutput(
            step_id=self._next_step_id,
            released_slots=tuple(self._released_slots),
            started=started,
            appended_blocks=appended,
            slots=slots.astype(np.int32),
            num_scheduled_tokens=counts.astype(np.int32),
            num_computed_tokens=(stops - counts).astype(np.int32),
            samples=samples,
        )
        self._steps.append(StepInFlight(output, slots, samples | scored))
        self._released_slots.clear()
        self._next_step_id += 1
        return output

    def commit(self, output: SchedulerOutput, result: StepResult) -> StepOutcome:
        """Confirms the oldest step in flight: appends its tokens and contains its numerical faults. What it brought for
        sequences that have ended meanwhile is discarded. Raises ValueError for a step out of turn, or where a token is
        missing."""
        step = self._steps[0] if self._steps else None
        if step is None or step.output.step_id != output.step_id or result.step_id != output.step_id:
            raise ValueError(f"step {output.step_id} with the result of {result.step_id} is not the oldest in flight")
        if ((result.token_ids < 0) & step.output.samples & result.is_finite).any():
            raise ValueError(f"step {output.step_id}: the result lacks a token that was to be sampled")
        faulty = [] if result.is_finite.all() else self._contain_faults(step, result)
        sequences, token_ids = step.take_tokens(self._table, result.token_ids)
        self._table.confirm(step.slots, step.output.samples)
        self._steps.popleft()
        self._last_committed = output.step_id
        retiring, self._retiring = self._retiring, []
        for slot in retiring:
            self._retire(slot)
        return StepOutcome(sequences, token_ids, faulty)

    def _contain_faults(self, step: StepInFlight, result: StepResult) -> list[Sequence]:
        """Ends the faulty sequences and starts those over that read their KV. Returns the former."""
        trace = trace_faults(step, result.is_finite, self._table, self._pool)
        self._pool.drop(trace.spoilt_blocks)
        ended = [s for s in trace.sources if s.status is not SequenceStatus.FINISHED]
        for sequence in ended:
            self._end(sequence, shares_blocks=False)
            sequence.finish_reason = "error"
        for sequence in trace.readers:
            self._start_over(sequence)
        return ended

    def _start_over(self, sequence: Sequence) -> None:
        """Recomputes a sequence from its confirmed tokens, disbelieving all steps in flight."""
        for step in self._steps:
            step.cancelled.add(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self._preempt(sequence)
        sequence.num_in_flight_tokens = 0

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | None = None) -> None:
        """Ends a waiting or running sequence with its answer. Raises ValueError where it has ended already."""
        request, num_tokens = sequence.request, len(sequence.output_tokens)
        self._end(sequence)
        is_cut = num_tokens >= request.max_tokens
        self._lengths.add(sequence.length_class, num_tokens, is_cut, request.expected_tokens)
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason

    def abort(self, sequence: Sequence) -> None:
        """Ends a waiting or running sequence without an answer. Raises ValueError where it has ended already."""
        self._end(sequence)

    def _end(self, sequence: Sequence, shares_blocks: bool = True) -> None:
        if sequence.status is SequenceStatus.FINISHED:
            raise ValueError(f"request {sequence.request.id} has ended already")
        if sequence.status is SequenceStatus.RUNNING:
            self._vacate(sequence, shares_blocks)
        else:
            self._waiting.forget()
        sequence.status = SequenceStatus.FINISHED
        sequence.num_in_flight_tokens = 0

    def _preempt(self, sequence: Sequence) -> None:
        slot = sequence.slot
        sequence.num_lost_tokens = int(self._table.computed[slot])
        sequence.num_in_flight_tokens = int(self._table.in_flight[slot])
        self._vacate(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self._waiting.put_back(sequence)

    def _vacate(self, sequence: Sequence, shares_blocks: bool = True) -> None:
        slot = sequence.slot
        if shares_blocks:
            self._register_full_blocks(slot)
        for step in self._steps:
            step.departed.setdefault(sequence, slot)  # one that started anew since has another
        self._table.vacate(slot)
        sequence.slot = -1
        self._retire(slot)

    def _retire(self, slot: int) -> None:
        """Gives back a vacated slot and its blocks, at once or when the steps in flight that read them have ended."""
        if self._table.last_step[slot] > self._last_committed:
            self._retiring.append(slot)
        else:
            self._pool.free(self._table.free(slot))
            self._released_slots.append(slot)

    def _register_full_blocks(self, slot: int) -> None:
        first, stop = self._table.take_full_blocks(slot)
        self._register(self._table.sequence_in(slot), self._table.blocks_of(slot), first, stop)

    def _register(self, sequence: Sequence, blocks: BlockIds, first: int, stop: int) -> None:
        """Makes blocks [first, stop) of its table findable, which are full of known tokens."""
        if first < stop and self._shares_blocks:
            token_ids = known_tokens(sequence, first * self._block_size, stop * self._block_size)
            parent = blocks.item(first - 1) if first else None
            self._pool.register(blocks[first:stop], token_ids, sequence.cache_domain, parent)
