"""The scheduler's bookkeeping of running sequences as NumPy arrays with one entry a slot, so that a decode step costs a
few vector operations whatever the number of sequences. Owned by the scheduler."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.scheduling.lengths import OutputLengths
from batchinfer.sequence import Sequence

IntArray = npt.NDArray[np.int64]
_GOLDEN_RATIO = (5**0.5 - 1) / 2


def token_slice(sequence: Sequence, start: int, stop: int) -> npt.NDArray[np.int32]:
    """Tokens [start, stop) of the prompt and the confirmed output."""
    prompt = sequence.request.prompt_token_ids
    num_prompt_tokens = len(prompt)
    if stop <= num_prompt_tokens:
        return prompt[start:stop]
    output = sequence.output_token_ids[max(0, start - num_prompt_tokens) : stop - num_prompt_tokens]
    tail = np.array(output, dtype=np.int32)
    return tail if start >= num_prompt_tokens else np.concatenate([prompt[start:], tail])


def _level(place: Any) -> Any:
    """Above 0, below 1. Multiples of the golden ratio are evenly spread, however many. place: a number or an array."""
    return 1e-3 + (1 - 2e-3) * (place * _GOLDEN_RATIO % 1)


class RunningTable:
    """A slot is free, running, or retiring: vacated while steps in flight still read its blocks. Its sequence and block
    table stay until the slot is free, so that an entry of a step in flight can be traced by its slot."""

    def __init__(self, max_num_seqs: int, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self.sequences = np.full(max_num_seqs, None, np.object_)  # each a Sequence or None
        self.outputs = np.full(max_num_seqs, None, np.object_)  # the lists of their confirmed tokens
        self.block_tables: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self.known = np.zeros(max_num_seqs, np.int64)  # prompt and confirmed tokens
        self.in_flight = np.zeros(max_num_seqs, np.int64)  # tokens that steps in flight will sample
        self.computed = np.zeros(max_num_seqs, np.int64)  # tokens whose KV is written, steps in flight included
        self.limit = np.zeros(max_num_seqs, np.int64)  # tokens that ever need computing
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.max_tokens = np.zeros(max_num_seqs, np.int64)
        self.expected_tokens = np.zeros(max_num_seqs, np.int64)  # of the answer, by an earlier run; -1: not known
        self.length_class = np.zeros(max_num_seqs, np.int64)  # of lengths.OutputLengths
        self.level = np.zeros(max_num_seqs)  # where among like answers this one's length is assumed to lie
        self.scores_only = np.zeros(max_num_seqs, np.bool_)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.num_own = np.zeros(max_num_seqs, np.int64)  # of them, those that no other sequence has held with it
        self._owner = np.full(num_blocks, -1, np.int64)  # the slot that has a block alone, of blocks in use; or -1
        self.num_registered = np.zeros(max_num_seqs, np.int64)  # leading blocks known to the prefix index
        self.last_step = np.full(max_num_seqs, -1, np.int64)  # latest step that computes the sequence
        self.num_computed = 0  # tokens of all steps so far
        self.num_recomputed = 0  # of them, what preemptions gave up and the prefix cache had not when it went on
        self.num_changes = 0  # sequences placed and vacated so far
        self.most_blocks = 0  # that running sequences will ever hold, if they share none
        self._num_placed = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
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

    def place(
        self,
        sequence: Sequence,
        num_cached_tokens: int,
        count: int,
        step_id: int,
        shared_blocks: list[int],
    ) -> int:
        """Gives a sequence that holds its blocks a slot; a step computes `count` tokens after the cached ones.
        shared_blocks: those of them that others hold, too."""
        slot = self._free_slots.pop()
        sequence.slot = slot
        self.sequences[slot] = sequence
        self.outputs[slot] = sequence.output_token_ids
        self.block_tables[slot] = sequence.block_table
        self.known[slot] = sequence.num_confirmed_tokens
        self.in_flight[slot] = 0
        self.computed[slot] = num_cached_tokens + count
        self.limit[slot] = limit = num_tokens_to_compute(sequence)
        self.num_prompt_tokens[slot] = sequence.num_prompt_tokens
        self.max_tokens[slot] = sequence.request.max_tokens
        told = sequence.request.expected_tokens
        self.expected_tokens[slot] = -1 if told is None else told
        self.length_class[slot] = sequence.length_class
        self.level[slot] = _level(self._num_placed + 1)
        self.scores_only[slot] = sequence.request.max_tokens == 0
        self.num_blocks[slot] = len(sequence.block_table)
        self._own_all_but(slot, shared_blocks)
        self.num_registered[slot] = num_cached_tokens // self.block_size
        self.last_step[slot] = step_id
        self.num_computed += count
        self.num_recomputed += max(0, sequence.num_lost_tokens - num_cached_tokens)
        self.most_blocks += -(-limit // self.block_size)
        self._num_placed += 1
        self.num_changes += 1
        self._admitted[slot] = self._come[slot] = None
        return slot

    def _own_all_but(self, slot: int, shared_blocks: list[int]) -> None:
        blocks = self.block_tables[slot]
        if shared_blocks:
            np.subtract.at(self.num_own, self.owners(shared_blocks), 1)
        self._owner[blocks] = slot
        self._owner[shared_blocks] = -1
        self.num_own[slot] = len(blocks) - len(shared_blocks)

    def owners(self, blocks: list[int]) -> list[int]:
        """The slot that has it alone, for each of the blocks in use that one has alone."""
        owners = self._owner[blocks]
        return owners[owners >= 0].tolist()

    def vacate(self, slot: int) -> None:
        """The slot's sequence runs no more; the slot retires."""
        self.num_changes += 1
        self.most_blocks -= -(-int(self.limit[slot]) // self.block_size)
        del self._admitted[slot]
        if slot in self._come:
            del self._come[slot]
        else:
            self._gone.append(slot)

    def free(self, slot: int) -> list[int]:
        """Makes a retired slot free again and returns its blocks."""
        blocks = self.block_tables[slot]
        self.sequences[slot] = self.outputs[slot] = None
        self.block_tables[slot] = []
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
        lengths.update(self.length_class[slots], self.num_generated(slots))

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
        pending = np.minimum(self.known[order] + self.in_flight[order], self.limit[order]) - self.computed[order]
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

    def append_blocks(self, slots: IntArray, missing: IntArray, blocks: list[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Hands out `blocks`, missing[i] of them to slots[i]; returns (slot, block ids) where there are any."""
        lacking = np.flatnonzero(missing)
        slots, missing = slots[lacking], missing[lacking]
        self.num_blocks[slots] += missing
        self.num_own[slots] += missing
        self._owner[blocks] = np.repeat(slots, missing)
        receivers, stops = slots.tolist(), np.cumsum(missing).tolist()
        pieces: Iterable[tuple[int, ...]] = zip(blocks, strict=True)
        if len(blocks) > len(receivers):
            pieces = (tuple(blocks[start:stop]) for start, stop in pairwise([0, *stops]))
        appended = list(zip(receivers, pieces, strict=True))
        for slot, ids in appended:
            self.block_tables[slot] += ids
        return appended

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

    def confirm(self, slots: IntArray) -> None:
        """One token in flight of each slot has become known."""
        self.known[slots] += 1
        self.in_flight[slots] -= 1

    def take_full_blocks(self, slot: int) -> tuple[int, int]:
        """[first, stop): blocks of the slot that have become full of known tokens since last asked."""
        full = min(int(self.computed[slot]), int(self.known[slot])) // self.block_size
        first, self.num_registered[slot] = int(self.num_registered[slot]), full
        return first, full


def num_tokens_to_compute(sequence: Sequence) -> int:
    """Positions whose KV is ever written: the last sampled token is an answer, never an input."""
    return max(sequence.num_prompt_tokens, sequence.max_num_tokens - 1)
