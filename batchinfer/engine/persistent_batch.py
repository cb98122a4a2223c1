"""The running sequences in fixed slots of NumPy arrays, kept up to date by each SchedulerOutput's difference. A step's
flat arrays are gathered from them without a loop over tokens or sequences. Owned by the input builder; no torch."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchinfer.scheduler_output import SchedulerOutput, StartedSequence


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a forward pass reads, ragged: the tokens of sequence i are [cu_seqlens_q[i], cu_seqlens_q[i + 1])."""

    token_ids: npt.NDArray[np.int64]  # [num_tokens]; -1 where a step in flight samples the token
    positions: npt.NDArray[np.int64]  # [num_tokens]
    slot_mapping: npt.NDArray[np.int64]  # [num_tokens], block id * block_size + offset in the block
    block_table: npt.NDArray[np.int32]  # [num_seqs, most blocks of any], 0 beyond a sequence's own
    cu_seqlens_q: npt.NDArray[np.int32]  # [num_seqs + 1]
    seq_lens: npt.NDArray[np.int32]  # [num_seqs], tokens of context, this step's included
    logits_indices: npt.NDArray[np.int64]  # [num_samples], the tokens after which one is sampled, in batch order
    late_slots: npt.NDArray[np.int64] | None = None  # [num_tokens], slots of the tokens; None: all tokens are known


class PersistentBatch:
    """Arrays with one row a slot; memory is touched as far as sequences reach. Call `apply` and `build` for each step
    in the order of schedule, `expect` where it is not waited for, and `append_sampled` with what it brought."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self._tokens = np.zeros((max_num_seqs, max_model_len), np.int32)
        self._block_tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._num_tokens = np.zeros(max_num_seqs, np.int32)  # known tokens
        self._in_flight = np.zeros(max_num_seqs, np.int32)  # tokens that follow them, expected

    def apply(self, output: SchedulerOutput) -> None:
        """Takes over which slots are released, started and given blocks."""
        released = list(output.released_slots)
        self._num_tokens[released] = 0
        self._in_flight[released] = 0
        for started in output.started:
            self._start(started)
        slots, places, block_ids = output.appended_blocks
        self._block_tables[slots, places] = block_ids

    def _start(self, started: StartedSequence) -> None:
        num_tokens = len(started.token_ids)
        self._tokens[started.slot, :num_tokens] = started.token_ids
        self._num_tokens[started.slot] = num_tokens
        self._in_flight[started.slot] = 0
        self._block_tables[started.slot, : len(started.block_ids)] = started.block_ids

    def expect(self, slots: npt.NDArray[np.int32]) -> None:
        """A step that will sample a token in each of the slots is under way: later ones may compute these tokens."""
        self._in_flight[slots] += 1

    def in_flight(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """How many tokens are expected in each slot."""
        return self._in_flight[slots]

    def append_sampled(self, slots: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32]) -> None:
        """Appends token_ids[i] to slots[i], nothing where it is -1; the arguments are a SchedulerOutput's slots and its
        StepResult's token_ids."""
        sampled = token_ids >= 0
        slots = slots[sampled]
        self._tokens[slots, self._num_tokens[slots]] = token_ids[sampled]
        self._num_tokens[slots] += 1
        self._in_flight[slots] = np.maximum(self._in_flight[slots] - 1, 0)

    def build(self, output: SchedulerOutput) -> StepInputs:
        """The inputs of the step that was applied last. Raises ValueError where it computes a token that is neither
        known nor the last one expected of its slot."""
        slots, counts, starts = output.slots, output.num_scheduled_tokens, output.num_computed_tokens
        seq_lens = starts + counts
        cu_seqlens_q = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=cu_seqlens_q[1:])
        rows = np.repeat(slots, counts)
        # Flat index + (first position - first flat index) of the token's sequence.
        positions = np.arange(len(rows)) + np.repeat(starts - cu_seqlens_q[:-1], counts)
        blocks = self._block_tables[rows, positions // self._block_size].astype(np.int64)
        token_ids = self._tokens[rows, positions].astype(np.int64)
        late = (seq_lens > self._num_tokens[slots]).any()
        if late:
            token_ids[self._late(output, rows, positions)] = -1
        return StepInputs(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=blocks * self._block_size + positions % self._block_size,
            block_table=self._block_table_of(slots, seq_lens),
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            logits_indices=cu_seqlens_q[1:][output.samples].astype(np.int64) - 1,
            late_slots=rows.astype(np.int64) if late else None,
        )

    def _late(
        self, output: SchedulerOutput, rows: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Which tokens, of these slots at these positions, are not known. The device knows a slot's last one only."""
        known = self._num_tokens[rows]
        late = positions >= known
        if (positions != known + self._in_flight[rows] - 1)[late].any():
            raise ValueError(f"step {output.step_id} computes tokens that are not sampled yet")
        return late

    def _block_table_of(self, slots: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        num_blocks = -(-seq_lens // self._block_size)
        columns = np.arange(int(num_blocks.max()))
        table = self._block_tables[slots, : len(columns)]
        table[columns >= num_blocks[:, None]] = 0  # left by an earlier sequence, or not reached yet
        return table
