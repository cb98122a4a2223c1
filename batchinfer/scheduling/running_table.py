"""The scheduler's bookkeeping of running sequences as NumPy arrays with one entry a slot, so that a decode step costs a
few vector operations whatever the number of sequences. Owned by the scheduler."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from batchinfer.cache.block_run import BlockIds
from batchinfer.scheduling.lengths import OutputLengths
from batchinfer.sequence import Sequence

IntArray = npt.NDArray[np.int64]
_GOLDEN_RATIO = (5**0.5 - 1) / 2


def known_tokens(sequence: Sequence, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int32]:
    """Tokens [start, stop) of the prompt and the confirmed output, by default all; a view of the prompt where it has
    them."""
    prompt = sequence.request.prompt_token_ids
    num_prompt_tokens = len(prompt)
    if stop is None:
        stop = num_prompt_tokens + len(sequence.output_tokens)
    if stop <= num_prompt_tokens:
        return prompt[start:stop]
    answer = np.frombuffer(
        sequence.output_tokens[max(0, start - num_prompt_tokens) : stop - num_prompt_tokens], np.int32
    )
    return answer if start >= num_prompt_tokens else np.concatenate([prompt[start:], answer])


class Start(NamedTuple):
    """A sequence that is to have a slot; a step computes so many tokens after the cached ones."""

    sequence: Sequence
    token_ids: npt.NDArray[np.int32]  # all that are known
    block_ids: BlockIds
    num_cached_tokens: int
    num_scheduled_tokens: int
    held_alone: BlockIds  # of the blocks of the cached tokens
    held_by_two: BlockIds  # the same


def _level(place: Any) -> Any:
    """Above 0, below 1. Multiples of the golden ratio are evenly spread, however many. place: a number or an array."""
    return 1e-3 + (1 - 2e-3) * (place * _GOLDEN_RATIO % 1)


class RunningTable:
    """A slot is free, running, or retiring: vacated while steps in flight still read its blocks. Its sequence and block
    table stay until the slot is free, so that an entry of a step in flight can be traced by its slot."""

    def __init__(self, max_num_seqs: int, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self.sequences = np.full(max_num_seqs, None, np.object_)  # each a Sequence or None
        self.outputs = np.full(max_num_seqs, None, np.object_)  # their output_tokens
        self._block_tables = np.zeros((max_num_seqs, 0), np.int64)  # widened as longer sequences come
        self.known = np.zeros(max_num_seqs, np.int64)  # prompt and confirmed tokens
        self.in_flight = np.zeros(max_num_seqs, np.int64)  # tokens that steps in flight will sample
        self.computed = np.zeros(max_num_seqs, np.int64)  # tokens whose KV is written, steps in flight included
        self.limit = np.zeros(max_num_seqs, np.int64)  # tokens that ever need computing
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        # What is known of an answer's length: its class of lengths.OutputLengths, max_tokens, and what an earlier run
        # tells, -1 where none does.
        self.length_facts = np.zeros((3, max_num_seqs), np.int64)
        self.level = np.zeros(max_num_seqs)  # where among like answers this one's length is assumed to lie
        self.scores_only = np.zeros(max_num_seqs, np.bool_)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.num_own = np.zeros(max_num_seqs, np.int64)  # of them, those that no other sequence has held with it
        self._owner = np.full(num_blocks, -1, np.int32)  # the slot that has a block alone, of blocks in use; or -1
        self.num_registered = np.zeros(max_num_seqs, np.int64)  # leading blocks known to the prefix index
        self.last_step = np.full(max_num_seqs, -1, np.int64)  # latest step that computes the sequence
        self.num_computed = 0  # tokens of all steps so far
        # What preemptions gave up and the prefix cache had not when the sequence started again: counted whole at that
        # start, where the tokens may be computed in several steps from then on.
        self.num_recomputed = 0
        self.num_changes = 0  # sequences placed and vacated so far
        self.most_blocks = 0  # that running sequences will ever hold, if they share none
        self._num_placed = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._num_slots_used = 0  # ever, the first ones
        self._admitted: dict[int, None] = {}  # running slots in the order of admission
        self._order = np.zeros(0, np.int64)  # the same as an array, but for what has come and gone since it was made:
        self._come: dict[int, None] = {}
        self._gone: list[int] = []
        self._is_gone = np.zeros(max_num_seqs, np.bool_)  # all False, between two uses

    @property
    def num_running(self) -> int:
        return len(self._admitted)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def next_levels(self, count: int) -> npt.NDArray[np.float64]:
        """`level` of the next sequences to be placed."""
        return _level(self._num_placed + 1 + np.arange(count))

    def place(self, start: Start, step_id: int) -> int:
        """Gives a sequence that holds its blocks a slot. step_id: of the step that computes its first tokens; of these,
        the caller makes full blocks known to the prefix index."""
        sequence, token_ids, block_ids, num_cached_tokens, count, _, _ = start
        request, num_tokens = sequence.request, len(token_ids)
        sequence.slot = slot = self._free_slots.pop()
        self._num_slots_used = max(self._num_slots_used, slot + 1)
        self.sequences[slot] = sequence
        self.outputs[slot] = sequence.output_tokens
        self.known[slot] = num_tokens
        self.in_flight[slot] = 0
        self.computed[slot] = num_cached_tokens + count
        self.limit[slot] = limit = sequence.num_tokens_to_compute
        self._widen(len(block_ids))
        self._block_tables[slot, : len(block_ids)] = block_ids
        self.num_prompt_tokens[slot] = len(request.prompt_token_ids)
        self.length_facts[:, slot] = length_facts(sequence)
        self.level[slot] = _level(self._num_placed + 1)
        self.scores_only[slot] = request.max_tokens == 0
        self.num_blocks[slot] = len(block_ids)
        self.num_registered[slot] = (num_cached_tokens + count) // self.block_size
        self._own(slot, block_ids[num_cached_tokens // self.block_size :], start.held_alone, start.held_by_two)
        self.last_step[slot] = step_id
        self.num_computed += count
        self.num_recomputed += max(0, sequence.num_lost_tokens - num_cached_tokens)
        self.most_blocks += -(-limit // self.block_size)
        self._num_placed += 1
        self.num_changes += 1
        self._admitted[slot] = self._come[slot] = None
        return slot

    def _widen(self, num_blocks: int) -> None:
        """Makes room for block tables of that length. Memory is touched as far as they reach."""
        width = self._block_tables.shape[1]
        if num_blocks > width:
            tables = np.zeros((len(self._block_tables), max(num_blocks, 2 * width)), np.int64)
            tables[:, :width] = self._block_tables
            self._block_tables = tables

    def _own(self, slot: int, new: BlockIds, held_alone: BlockIds, held_by_two: BlockIds) -> None:
        """Of the cached blocks, those that more than two hold have lost their owners before."""
        self._owner[new] = slot
        if len(held_alone):
            self._owner[held_alone] = slot
        if len(held_by_two):
            np.subtract.at(self.num_own, self.owners(held_by_two), 1)
            self._owner[held_by_two] = -1
        self.num_own[slot] = len(new) + len(held_alone)

    def owners(self, blocks: BlockIds) -> list[int]:
        """The slot that has it alone, for each of the blocks in use that one has alone."""
        return [owner for owner in self._owner[blocks].tolist() if owner >= 0]

    def blocks_of(self, slot: int) -> BlockIds:
        """Its block table; a view, which is another sequence's once the slot has been freed."""
        return self._block_tables[slot, : self.num_blocks[slot]]

    def vacate(self, slot: int) -> None:
        """The slot's sequence runs no more; the slot retires."""
        self.num_changes += 1
        self.most_blocks -= -(-self.limit.item(slot) // self.block_size)
        del self._admitted[slot]
        if slot in self._come:
            del self._come[slot]
        else:
            self._gone.append(slot)

    def free(self, slot: int) -> BlockIds:
        """Makes a retired slot free again and returns its blocks."""
        blocks = self.blocks_of(slot).copy()
        self.sequences[slot] = self.outputs[slot] = None
        self.num_blocks[slot] = 0
        self._free_slots.append(slot)
        return blocks

    def in_admission_order(self) -> IntArray:
        if self._gone:
            self._is_gone[self._gone] = True
            self._order = self._order[~self._is_gone[self._order]]
            self._is_gone[self._gone] = False
            self._gone.clear()
        if self._come:
            self._order = np.concatenate([self._order, np.fromiter(self._come, np.int64, len(self._come))])
            self._come.clear()
        return self._order

    def last_admitted(self) -> Sequence:
        return self.sequence_in(next(reversed(self._admitted)))

    def num_generated(self, slots: IntArray) -> IntArray:
        """Tokens of the answers, those in flight included."""
        return self.known[slots] + self.in_flight[slots] - self.num_prompt_tokens[slots]

    def teach(self, lengths: OutputLengths) -> None:
        """Works out the lengths anew, by what runs now."""
        slots = self.in_admission_order()
        lengths.update(self.length_facts[0, slots], self.num_generated(slots))

    def sequence_in(self, slot: int) -> Sequence:
        """slot: not free."""
        sequence: Sequence = self.sequences[slot]
        return sequence

    def sequences_in(self, slots: npt.NDArray[np.integer]) -> list[Sequence]:
        """slots: none of them free."""
        sequences: list[Sequence] = self.sequences[slots].tolist()
        return sequences

    def plan(self, budget: int) -> tuple[IntArray, IntArray]:
        """Slots and token counts that use up to `budget` tokens: first those with one token to compute, then longer
        chunks, each in the order of admission."""
        order = self.in_admission_order()
        top = self._num_slots_used
        known = self.known[:top] + self.in_flight[:top]
        pending = (np.minimum(known, self.limit[:top]) - self.computed[:top])[order]
        single = pending == 1
        if len(order) <= budget and single.all():
            return order, pending
        several = pending > 1
        slots = np.concatenate([order[single], order[several]])
        pending = np.concatenate([pending[single], pending[several]])
        counts = np.minimum(pending, budget - (np.cumsum(pending) - pending))
        scheduled = counts > 0
        return slots[scheduled], counts[scheduled]

    def blocks_missing(self, slots: IntArray, counts: IntArray) -> IntArray:
        """Blocks that each slot lacks to compute that many tokens more."""
        needed = -(-(self.computed[slots] + counts) // self.block_size)
        return np.maximum(needed - self.num_blocks[slots], 0)

    def append_blocks(self, slots: IntArray, missing: IntArray, blocks: BlockIds) -> IntArray:
        """Hands out `blocks`, missing[i] of them to slots[i]; returns them as SchedulerOutput.appended_blocks."""
        if not len(blocks):
            return np.zeros((3, 0), np.int64)
        lacking = np.flatnonzero(missing)
        slots, missing = slots[lacking], missing[lacking]
        places = self.num_blocks[slots]
        self.num_blocks[slots] += missing
        self.num_own[slots] += missing
        if len(blocks) > len(slots):
            places = np.repeat(places - (np.cumsum(missing) - missing), missing) + np.arange(len(blocks))
            slots = np.repeat(slots, missing)
        self._widen(int(places.max()) + 1)
        self._owner[blocks] = slots
        self._block_tables[slots, places] = blocks
        return np.array([slots, places, blocks])

    def advance(self, slots: IntArray, counts: IntArray, step_id: int) -> None:
        """A step computes that many tokens more."""
        self.computed[slots] += counts
        self.num_computed += int(counts.sum())
        self.last_step[slots] = step_id

    def take_completions(self, slots: IntArray) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Once a step, after `advance` and `place`: whether the step samples a token of each slot (which is in flight
        from now on), and whether it completes a prompt that is only scored."""
        complete = self.computed[slots] == self.known[slots] + self.in_flight[slots]
        scores_only = self.scores_only[slots]
        samples = complete & ~scores_only
        self.in_flight[slots] += samples
        return samples, complete & scores_only

    def confirm(self, slots: IntArray, samples: npt.NDArray[np.bool_]) -> None:
        """One token in flight has become known of each slot of which the step samples one."""
        slots = slots if samples.all() else slots[samples]
        self.known[slots] += 1
        self.in_flight[slots] -= 1

    def take_full_blocks(self, slot: int) -> tuple[int, int]:
        """[first, stop): blocks of the slot that have become full of known tokens since last asked."""
        full = min(self.computed.item(slot), self.known.item(slot)) // self.block_size
        first, self.num_registered[slot] = self.num_registered.item(slot), full
        return first, full


def length_facts(sequence: Sequence) -> tuple[int, int, int]:
    """As in RunningTable.length_facts."""
    request = sequence.request
    told = request.expected_tokens
    return sequence.length_class, request.max_tokens, -1 if told is None else told
