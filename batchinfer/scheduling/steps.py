"""What the scheduler remembers of a step in flight, and what a committed step tells the engine."""

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchinfer.scheduler_output import SchedulerOutput
from batchinfer.scheduling.running_table import RunningTable
from batchinfer.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class StepInFlight:
    """A step between schedule and commit; entries stand in batch order."""

    output: SchedulerOutput
    slots: npt.NDArray[np.int64]  # of the entries
    reports: npt.NDArray[np.bool_]  # the entry brings a token, or completes a prompt that is only scored
    departed: dict[Sequence, int] = field(default_factory=dict)  # have left their slots since, with these
    cancelled: set[Sequence] = field(default_factory=set)  # their tokens are not to be believed, see faults.py

    def take_tokens(self, table: RunningTable, token_ids: npt.NDArray[np.int32]) -> tuple[list[Sequence], list[int]]:
        """Appends the step's tokens to the sequences that still want them, and returns both as StepOutcome does. Vector
        operations do nearly all of it: there is one entry for each running sequence in each step."""
        slots, is_taken = self.slots, self.reports
        awaiting = [sequence for sequence in self.departed if self._is_wanted(sequence)]
        if len(awaiting) < len(self.departed):
            is_unwanted = np.zeros(len(table.sequences), np.bool_)
            is_unwanted[[slot for sequence, slot in self.departed.items() if not self._is_wanted(sequence)]] = True
            is_taken = is_taken & ~is_unwanted[slots]
        if not is_taken.all():
            slots, token_ids = slots[is_taken], token_ids[is_taken]
        sequences, tokens = table.sequences_in(slots), token_ids.tolist()
        is_sampled = token_ids >= 0
        if is_sampled.all():
            _append_each(table.outputs[slots].tolist(), tokens)
        else:
            _append_each(table.outputs[slots[is_sampled]].tolist(), token_ids[is_sampled].tolist())
        for sequence, token in zip(sequences, tokens, strict=True) if awaiting else ():
            if token >= 0 and sequence in self.departed:
                sequence.num_in_flight_tokens -= 1
        return sequences, tokens

    def _is_wanted(self, sequence: Sequence) -> bool:
        return sequence.status is not SequenceStatus.FINISHED and sequence not in self.cancelled


def _append_each(arrays: "list[array[int]]", items: list[int]) -> None:
    deque(map(array.append, arrays, items), maxlen=0)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step brought.

    sequences, token_ids: in batch order, each sequence with its new token, which has been appended to its
    output_tokens; -1 for a sequence whose prompt is only scored and has now been computed. The engine decides which
    of them end.
    faulty: sequences whose numbers were not finite. They have been finished with reason "error" and their KV forgotten;
    the engine makes their Results.
    """

    sequences: list[Sequence]
    token_ids: list[int]
    faulty: list[Sequence]

    @property
    def sampled(self) -> Iterator[tuple[Sequence, int]]:
        """Each sequence with its token."""
        return zip(self.sequences, self.token_ids, strict=True)
