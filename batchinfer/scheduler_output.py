"""What one step computes, as a difference against the last step. Made by scheduling/, read by engine/input_builder.py;
free of torch, so that it can cross a process border."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchinfer.request import Request


@dataclass(frozen=True, slots=True)
class StartedSequence:
    """A sequence placed in a slot: new, or back after preemption with the tokens it had generated."""

    slot: int
    request: Request
    token_ids: npt.NDArray[np.int32]  # [num_tokens] prompt and confirmed output
    block_ids: npt.NDArray[np.int64]  # [num_blocks] cached prefix blocks first, then those newly allocated
    num_computed_tokens: int  # of them served by the prefix cache


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """Apply in this order: release slots, start sequences, append blocks, then run the scheduled tokens.

    Arrays have one entry a scheduled sequence, in batch order; sequence i computes its tokens
    [num_computed_tokens[i], num_computed_tokens[i] + num_scheduled_tokens[i]).
    """

    step_id: int
    released_slots: tuple[int, ...]
    started: tuple[StartedSequence, ...]
    appended_blocks: npt.NDArray[np.int64]  # [3, num_blocks]: slot, place in its block table and id; these were there
    slots: npt.NDArray[np.int32]
    num_scheduled_tokens: npt.NDArray[np.int32]
    num_computed_tokens: npt.NDArray[np.int32]
    samples: npt.NDArray[np.bool_]  # the step reaches the sequence's last token, so a token is sampled

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a finished step brought back, for Scheduler.commit. `token_ids` has one entry a scheduled sequence; -1 where
    none was sampled. `is_finite` is False where the sequence's hidden state or logits held NaN or infinity."""

    step_id: int
    token_ids: npt.NDArray[np.int32]
    is_finite: npt.NDArray[np.bool_]
