"""A step between its launch and its end, as the model runner sees it: what is awaited of each of its parts, and how
that becomes the step's output."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from batchinfer.engine.device_queue import Fetch, Stamp
from batchinfer.engine.persistent_batch import StepInputs
from batchinfer.engine.sampler import SamplingPlan
from batchinfer.request import RequestId, TokenLogprob
from batchinfer.scheduler_output import SchedulerOutput, StepResult

PromptChunk = tuple[RequestId, int, npt.NDArray[np.float32]]  # (id, start, scores of prompt token start + 1 onwards)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A finished step: the scheduler's part, and what requests asked for beside tokens."""

    result: StepResult
    logprobs: Mapping[RequestId, TokenLogprob]
    prompt_scores: list[PromptChunk]
    forward_s: float
    sample_s: float


class StepHandle(Protocol):
    """A submitted step."""

    def result(self) -> StepOutput:
        """Waits for the step's end."""
        ...


@dataclass(slots=True)
class Laps:
    """Stretches of the device's time."""

    pairs: list[tuple[Stamp, Stamp]] = field(default_factory=list)

    def add(self, start: Stamp, end: Stamp) -> Stamp:
        """Returns the end, at which the next may start."""
        self.pairs.append((start, end))
        return end

    @property
    def seconds(self) -> float:
        return sum(start.seconds_until(end) for start, end in self.pairs)


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Rows that are sampled at once. entries: theirs in the part; ids: of the requests that ask for log-probabilities,
    by row."""

    plan: SamplingPlan
    entries: npt.NDArray[np.intp]
    ids: Mapping[int, RequestId]


@dataclass(slots=True, eq=False)
class StepPart:
    """A forward pass and the sampling after it. Almost always the whole step; see step_halves.py."""

    output: SchedulerOutput  # of the part
    inputs: StepInputs
    scored: list[tuple[RequestId, int, int]] = field(default_factory=list)  # (id, start, entry) of prompts' chunks
    forward: Fetch | None = None  # is each token finite?, then the prompt scores
    planned: list[PlannedRows] = field(default_factory=list)
    sampled: Fetch | None = None  # what the plans' `choose` returned; None: not launched, or nothing to sample
    forward_laps: Laps = field(default_factory=Laps)
    sample_laps: Laps = field(default_factory=Laps)
    last_hidden: Tensor | None = None  # [num_samples, hidden_size]; written by the forward work for the sampling

    @property
    def waits(self) -> bool:
        """Its sampling is yet to be launched."""
        return self.sampled is None and bool(self.output.samples.any())

    def finish(self) -> StepOutput:
        """Waits for the end of what was launched."""
        assert self.forward is not None
        finite_tokens, *chunks = self.forward.result()
        is_finite = np.logical_and.reduceat(finite_tokens, self.inputs.cu_seqlens_q[:-1])
        token_ids = np.full(len(self.output.slots), -1, np.int32)
        logprobs: dict[RequestId, TokenLogprob] = {}
        arrays = iter(self.sampled.result() if self.sampled is not None else ())
        for rows in self.planned:
            found = rows.plan.take(arrays)
            token_ids[rows.entries] = found.token_ids
            is_finite[rows.entries] &= found.is_finite
            logprobs.update((rows.ids[row], entry) for row, entry in found.logprobs.items())
        # A sequence that is not finite has ended, or is computed again.
        scored = zip(self.scored, chunks, strict=True)
        scores = [(request_id, start, values) for (request_id, start, i), values in scored if is_finite[i]]
        return StepOutput(
            StepResult(self.output.step_id, token_ids, is_finite),
            logprobs,
            scores,
            self.forward_laps.seconds,
            self.sample_laps.seconds,
        )


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A launched step, whole or in parts that follow each other."""

    output: SchedulerOutput
    parts: list[StepPart]
    outcome: StepOutput | None = None  # once the runner has taken it in

    @property
    def waits(self) -> bool:
        return any(part.waits for part in self.parts)

    def finish(self) -> StepOutput:
        """Waits for the step's end."""
        outcomes = [part.finish() for part in self.parts]
        return outcomes[0] if len(outcomes) == 1 else _join(self.output, self.parts, outcomes)


def _join(output: SchedulerOutput, parts: list[StepPart], outcomes: list[StepOutput]) -> StepOutput:
    """Of parts that are some of the sequences each, or some of the tokens of one sequence, of which the last count."""
    slots = np.concatenate([part.output.slots for part in parts])
    first = np.flatnonzero(np.concatenate([[True], slots[1:] != slots[:-1]]))
    last = np.append(first[1:], len(slots)) - 1
    token_ids = np.concatenate([outcome.result.token_ids for outcome in outcomes])
    is_finite = np.concatenate([outcome.result.is_finite for outcome in outcomes])
    return StepOutput(
        StepResult(output.step_id, token_ids[last], np.logical_and.reduceat(is_finite, first)),
        {request_id: entry for outcome in outcomes for request_id, entry in outcome.logprobs.items()},
        [scores for outcome in outcomes for scores in outcome.prompt_scores],
        sum(outcome.forward_s for outcome in outcomes),
        sum(outcome.sample_s for outcome in outcomes),
    )
