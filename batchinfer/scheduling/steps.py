"""What the scheduler remembers of a step in flight, and what a committed step tells the engine."""

from dataclasses import dataclass, field
from itertools import compress

import numpy as np
import numpy.typing as npt

from batchinfer.scheduler_output import SchedulerOutput
from batchinfer.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class StepInFlight:
    """A step between schedule and commit; entries stand in batch order."""

    output: SchedulerOutput
    reports: npt.NDArray[np.bool_]  # the entry brings a token, or completes a prompt that is only scored
    departed: set[Sequence] = field(default_factory=set)  # have left their slots since
    cancelled: set[Sequence] = field(default_factory=set)  # their tokens are not to be believed, see faults.py

    def take_tokens(self, sequences: list[Sequence], token_ids: list[int]) -> list[tuple[Sequence, int]]:
        """Appends the step's tokens to the sequences that still want them, and returns them as StepOutcome.sampled.
        sequences: of the entries."""
        reporting = zip(sequences, token_ids, strict=True)
        taken = list(reporting if self.reports.all() else compress(reporting, self.reports.tolist()))
        if self.departed or self.cancelled:
            taken = [(sequence, token) for sequence, token in taken if self._is_wanted(sequence)]
        for sequence, token in taken:
            if token >= 0:
                sequence.output_token_ids.append(token)
        for sequence, token in taken if self.departed else ():
            if token >= 0 and sequence in self.departed:
                sequence.num_in_flight_tokens -= 1
        return taken

    def _is_wanted(self, sequence: Sequence) -> bool:
        return sequence.status is not SequenceStatus.FINISHED and sequence not in self.cancelled


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step brought.

    sampled: in batch order, each sequence with its new token, which has been appended to its output_token_ids; -1 for a
    sequence whose prompt is only scored and has now been computed. The engine decides which of them end.
    faulty: sequences whose numbers were not finite. They have been finished with reason "error" and their KV forgotten;
    the engine makes their Results.
    """

    sampled: list[tuple[Sequence, int]]
    faulty: list[Sequence]
