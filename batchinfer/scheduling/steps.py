"""What the scheduler remembers of a step in flight, and what a committed step tells the engine."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchinfer.scheduler_output import SchedulerOutput
from batchinfer.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class StepInFlight:
    """A step between schedule and commit; entries stand in batch order."""

    output: SchedulerOutput
    sequences: list[Sequence]
    reports: npt.NDArray[np.bool_]  # the entry brings a token, or completes a prompt that is only scored
    cancelled: set[Sequence] = field(default_factory=set)  # their tokens are not to be believed, see faults.py

    def take_tokens(self, token_ids: list[int]) -> list[tuple[Sequence, int]]:
        """Appends the step's tokens to the sequences that still want them, and returns them as StepOutcome.sampled."""
        taken = []
        for sequence, token, reports in zip(self.sequences, token_ids, self.reports.tolist(), strict=True):
            if not reports or sequence.status is SequenceStatus.FINISHED or sequence in self.cancelled:
                continue
            if token >= 0:
                sequence.output_token_ids.append(token)
                sequence.num_in_flight_tokens -= 1
            taken.append((sequence, token))
        return taken


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
