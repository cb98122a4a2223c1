"""Runs scheduled steps: inputs, forward pass, logits of the rows that sample, tokens. Called by the engine; it alone
touches the model and the device.

A step is launched without waiting for those before it, and takes tokens that they are still sampling from the device.
Its own sampling is launched with it, unless a row's penalties count a token that the host does not know yet: then it
follows as soon as that token is there, and at the latest before the next forward pass.

Memory beside the model's activations: at most max(1, 2**25 // vocab_size) rows of logits at once (128 MiB of float32),
and what sampling and prompt scores say of themselves."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.cuda_graphs import DecodeGraphs, GraphPlan
from batchinfer.engine.device_errors import ForwardOutOfMemory, device_errors, forward_errors
from batchinfer.engine.device_queue import DeviceQueue
from batchinfer.engine.input_builder import build_forward_batch, fill_in_tokens, wanted_tokens
from batchinfer.engine.key_stacks import KeyStacks
from batchinfer.engine.model import Model
from batchinfer.engine.persistent_batch import PersistentBatch
from batchinfer.engine.prompt_scores import score_tokens
from batchinfer.engine.sampler import Sampler, SamplingPlan
from batchinfer.engine.step_halves import halves
from batchinfer.engine.step_in_flight import InFlightStep, PlannedRows, StepHandle, StepOutput, StepPart
from batchinfer.engine.warm_up import warm_up
from batchinfer.request import Request
from batchinfer.scheduler_output import SchedulerOutput

_LOGITS_ELEMENTS = 2**25
Scoring = tuple[Tensor, slice]  # int64 targets, and the rows of the hidden states before them


class ModelRunner:
    """Applies scheduler outputs, in their order, to the persistent batch and launches them on the queue.

    graphs: what decode steps are captured with, here and now; None: they are launched kernel by kernel. key_stacks:
    finds what sequences attend to together, where the device is to be told.
    """

    def __init__(
        self,
        model: Model,
        cache: Any,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        eos_token_ids: frozenset[int],
        queue: DeviceQueue,
        max_steps_in_flight: int,
        graphs: GraphPlan | None = None,
        key_stacks: KeyStacks | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._queue = queue
        self._key_stacks = key_stacks
        self._overlaps = max_steps_in_flight > 1  # a step may take tokens that an earlier one samples
        self._batch = PersistentBatch(max_num_seqs, max_model_len, block_size)
        self._sampler = Sampler(max_num_seqs, eos_token_ids, queue)
        self._requests: list[Request | None] = [None] * max_num_seqs  # by slot, of the latest sequence there
        self._scores_prompt = np.zeros(max_num_seqs, np.bool_)  # by slot
        self._prompt_lens = np.zeros(max_num_seqs, np.int32)  # by slot
        self._steps: deque[InFlightStep] = deque()  # in flight, oldest first
        self._max_blocks = -(-max_model_len // block_size)  # of a sequence
        self._most_logits = max(1, _LOGITS_ELEMENTS // model.vocab_size)  # rows made at once
        self._most_tokens: float = math.inf  # of one forward pass; halved where the device has no memory for it
        # Read and written by launched work only:
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=model.device)  # by slot
        self._logits: Tensor | None = None  # the largest of earlier steps, to be used again
        with device_errors(None), torch.inference_mode():
            self._graphs = self._captured(graphs) if graphs else None

    def _captured(self, graphs: GraphPlan) -> DecodeGraphs:
        width = self._key_stacks.width if self._key_stacks else 0
        return DecodeGraphs(graphs, self._model, self._cache, self._last_tokens, width)

    def warm_up(self, max_num_batched_tokens: int) -> None:
        """Compiles and loads what steps of up to that many tokens launch beside graphs. Raises as submit does."""
        with device_errors(None):
            sizes = (max_num_batched_tokens, len(self._requests), self._max_blocks)
            warm_up(self._model, self._cache, *sizes, self._most_logits, self._key_stacks)

    def submit(self, output: SchedulerOutput) -> StepHandle:
        """Raises BatchInferError where the device fails or has no memory left."""
        with device_errors(output), torch.inference_mode():
            while any(step.waits for step in self._steps):
                self._take_in()
            self._change_slots(output)
            step = InFlightStep(output, self._launch(output))
            self._steps.append(step)
            self._batch.expect(output.slots[output.samples])
            return _Handle(self, step)

    def outcome(self, step: InFlightStep) -> StepOutput:
        """Waits for the end of a submitted step. Raises as submit does."""
        with device_errors(step.output), torch.inference_mode():
            while step.outcome is None:
                self._take_in()
        return step.outcome

    def forget(self) -> None:
        """Drops all steps in flight. What they still do is done before anything that is submitted later."""
        self._steps.clear()

    def _take_in(self) -> None:
        """Waits for the oldest step, and launches what waits only for its tokens."""
        step = self._steps[0]
        step.outcome = step.finish()
        self._steps.popleft()
        result, slots = step.outcome.result, step.output.slots
        self._batch.append_sampled(slots, result.token_ids)
        samples = step.output.samples & result.is_finite  # of other rows the ids mean nothing
        self._sampler.count(slots[samples], result.token_ids[samples])
        if self._steps:
            for part in self._steps[0].parts:
                self._launch_sampling(part)

    def _change_slots(self, output: SchedulerOutput) -> None:
        self._batch.apply(output)
        for slot in output.released_slots:
            self._sampler.release(slot)
        for started in output.started:
            self._sampler.start(started)
            self._requests[started.slot] = started.request
            self._scores_prompt[started.slot] = started.request.params.prompt_logprobs
            self._prompt_lens[started.slot] = started.request.num_prompt_tokens

    def _launch(self, output: SchedulerOutput) -> list[StepPart]:
        """Launches the step whole, or in halves where the device has no memory for the whole."""
        if output.num_tokens <= self._most_tokens:
            try:
                return [self._launch_whole(output)]
            except ForwardOutOfMemory:
                if output.num_tokens < 2:
                    raise
                self._most_tokens = output.num_tokens // 2
        return [part for half in halves(output) for part in self._launch(half)]

    def _launch_whole(self, output: SchedulerOutput) -> StepPart:
        began = self._queue.stamp()
        part = StepPart(output, self._batch.build(output))
        forward, scoring = self._forward(part), list(self._scoring(part))
        indices = self._queue.upload(part.inputs.logits_indices)
        sampling = output.slots[output.samples]
        is_late = bool((self._sampler.counts_tokens(sampling) & (self._batch.in_flight(sampling) > 0)).any())

        def run() -> list[Tensor]:
            with forward_errors():
                hidden = forward()
            is_finite = hidden.abs().amax(dim=-1).isfinite()  # a NaN is the maximum of its row
            is_whole = len(indices) == len(hidden) and not is_late  # another pass may use a graph's output again
            part.last_hidden = hidden if is_whole else hidden[indices]
            ended = part.forward_laps.add(began, self._queue.stamp())
            scores = [self._score(hidden[rows], targets) for targets, rows in scoring]
            if scores:
                part.sample_laps.add(ended, self._queue.stamp())
            return [is_finite, *scores]

        part.forward = self._queue.launch(run)
        if not is_late:
            self._launch_sampling(part)
        return part

    def _forward(self, part: StepPart) -> Callable[[], Tensor]:
        """Work that computes the part's hidden states [num_tokens, hidden_size], as Model.forward returns them."""
        inputs, prompt_lens, upload = part.inputs, self._prompt_lens[part.output.slots], self._queue.upload
        stacks = self._key_stacks.of(inputs, prompt_lens) if self._key_stacks else None
        captured = self._graphs.prepare(inputs, prompt_lens, upload, stacks) if self._graphs else None
        if captured is not None:
            return captured
        scores = self._scores_prompt[part.output.slots]
        wanted = wanted_tokens(inputs, part.output.samples, scores, upload, self._key_stacks)
        batch = build_forward_batch(inputs, prompt_lens, upload, stacks, wanted)
        slots = None if inputs.late_slots is None else upload(inputs.late_slots)

        def run() -> Tensor:
            known = batch
            if slots is not None:
                known = replace(batch, token_ids=fill_in_tokens(batch.token_ids, slots, self._last_tokens))
            return self._model.forward(known, self._cache, known.prompt_lens)

        return run

    def _launch_sampling(self, part: StepPart) -> None:
        """Does nothing where that is done already. All earlier tokens of rows with penalties are to be known."""
        if not part.waits:
            return
        began = self._queue.stamp()
        part.planned = list(self._plan(part))
        slots = self._queue.upload(part.output.slots[part.output.samples].astype(np.int64)) if self._overlaps else None

        def run() -> list[Tensor]:
            hidden, part.last_hidden = part.last_hidden, None
            assert hidden is not None
            part.sample_laps.add(began, self._queue.stamp())
            found, start = list[Tensor](), 0
            for planned in part.planned:
                rows = slice(start, start := start + len(planned.entries))
                chosen = self._choose(part, planned.plan, hidden[rows])
                if slots is not None:  # a row that is not finite may have any number for a token
                    self._last_tokens[slots[rows]] = chosen[0].clamp(0, self._model.vocab_size - 1)
                found += chosen
            return found

        part.sampled = self._queue.launch(run)

    def _plan(self, part: StepPart) -> Iterator[PlannedRows]:
        """The part's rows that sample, as many at once as their logits may take memory."""
        sampling = np.flatnonzero(part.output.samples)
        for start in range(0, len(sampling), self._most_logits):
            entries = sampling[start : start + self._most_logits]
            slots, positions = part.output.slots[entries], part.inputs.seq_lens[entries].astype(np.int64)
            plan = self._sampler.plan(slots, positions, self._model.vocab_size)
            yield PlannedRows(plan, entries, {row: self._request(slots[row]).id for row in plan.rows_with_logprobs})

    def _choose(self, part: StepPart, plan: SamplingPlan, hidden: Tensor) -> list[Tensor]:
        start = self._queue.stamp()
        logits = self._compute_logits(hidden)
        start = part.forward_laps.add(start, self._queue.stamp())
        chosen = plan.choose(logits)
        part.sample_laps.add(start, self._queue.stamp())
        return chosen

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        """Valid until the next call. float32 ones of a CPU keep their memory: fresh pages would cost the processor a
        third of the product's time each step."""
        logits = self._model.compute_logits(hidden, self._logits)
        is_kept = logits.dtype == torch.float32 and logits.is_cpu
        if is_kept and (self._logits is None or len(logits) > len(self._logits)):
            self._logits = logits
        return logits

    def _request(self, slot: np.int32) -> Request:
        request = self._requests[slot]
        assert request is not None
        return request

    def _scoring(self, part: StepPart) -> Iterator[Scoring]:
        """The prompt tokens whose predecessors the part computes, for requests that ask for their scores."""
        output, inputs = part.output, part.inputs
        for entry in np.flatnonzero(self._scores_prompt[output.slots]).tolist():
            request = self._request(output.slots[entry])
            start, first_row = int(output.num_computed_tokens[entry]), int(inputs.cu_seqlens_q[entry])
            count = min(int(output.num_scheduled_tokens[entry]), request.num_prompt_tokens - 1 - start)
            if count > 0:
                part.scored.append((request.id, start, entry))
                targets = request.prompt_token_ids[start + 1 : start + 1 + count].astype(np.int64)
                yield self._queue.upload(targets), slice(first_row, first_row + count)

    def _score(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return score_tokens(self._model.compute_logits, hidden, targets, self._model.vocab_size)


@dataclass(frozen=True, slots=True)
class _Handle:
    runner: ModelRunner
    step: InFlightStep

    def result(self) -> StepOutput:
        return self.runner.outcome(self.step)
