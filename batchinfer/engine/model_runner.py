"""Runs one scheduled step: inputs, forward pass, logits of the rows that sample, tokens. Called by the engine; it alone
touches the model and the device.

Memory beside the model's activations: at most max(1, 2**25 // vocab_size) rows of logits at once (128 MiB of float32),
and what sampling and prompt scores say of themselves."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer.engine.input_builder import ForwardBatch, build_forward_batch
from batchinfer.engine.persistent_batch import PersistentBatch, StepInputs
from batchinfer.engine.prompt_scores import score_tokens
from batchinfer.engine.sampler import Sampler
from batchinfer.engine.step_halves import halves
from batchinfer.errors import BatchInferError
from batchinfer.request import Request, RequestId, TokenLogprob
from batchinfer.scheduler_output import SchedulerOutput, StepResult

_LOGITS_ELEMENTS = 2**25
PromptChunk = tuple[RequestId, int, npt.NDArray[np.float32]]  # (id, start, scores of prompt token start + 1 onwards)


class Model(Protocol):
    """What the engine runs: models.decoder.Decoder, or a stand-in without weights. `cache` is handed through to it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, batch: ForwardBatch, cache: Any, prompt_lens: Tensor) -> Tensor:
        """Hidden states after the last norm [num_tokens, hidden_size]; the batch's keys and values go to the cache.
        prompt_lens: the batch's, for rotary embeddings whose frequencies depend on the prompt's length."""
        ...

    def compute_logits(self, hidden: Tensor, scratch: Tensor | None = None) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size], of a float dtype. scratch: an earlier result, whose memory may be used
        again."""
        ...


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


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """Handle of a step that ran within submit."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


class ModelRunner:
    """Applies scheduler outputs, in their order, to the persistent batch and runs them."""

    def __init__(
        self,
        model: Model,
        cache: Any,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._model = model
        self._cache = cache
        self._batch = PersistentBatch(max_num_seqs, max_model_len, block_size)
        self._sampler = Sampler(max_num_seqs, eos_token_ids, model.device)
        self._requests: list[Request | None] = [None] * max_num_seqs  # by slot, of the latest sequence there
        self._scores_prompt = np.zeros(max_num_seqs, np.bool_)  # by slot
        self._prompt_lens = np.zeros(max_num_seqs, np.int32)  # by slot
        self._logits: Tensor | None = None  # the largest of earlier steps, to be used again
        self._most_tokens: float = math.inf  # of one forward pass; halved where the device has no memory for it

    def submit(self, output: SchedulerOutput) -> StepHandle:
        """Raises BatchInferError where the device fails or has no memory left."""
        with _device_errors(output), torch.inference_mode():
            self._change_slots(output)
            return FinishedStep(self._run(output))

    def _change_slots(self, output: SchedulerOutput) -> None:
        self._batch.apply(output)
        for slot in output.released_slots:
            self._sampler.release(slot)
        for started in output.started:
            self._sampler.start(started)
            self._requests[started.slot] = started.request
            self._scores_prompt[started.slot] = started.request.params.prompt_logprobs
            self._prompt_lens[started.slot] = started.request.num_prompt_tokens

    def _run(self, output: SchedulerOutput) -> StepOutput:
        """Runs the step whole, or in halves where the device has no memory for the whole."""
        if output.num_tokens <= self._most_tokens:
            try:
                return self._run_whole(output)
            except _ForwardOutOfMemory as error:
                if output.num_tokens < 2:
                    raise error.cause from None
                self._most_tokens = output.num_tokens // 2
        return _join(output, [self._run(half) for half in halves(output)])

    def _run_whole(self, output: SchedulerOutput) -> StepOutput:
        watch = _Stopwatch()
        inputs = self._batch.build(output)
        batch = build_forward_batch(inputs, self._prompt_lens[output.slots], self._model.device)
        hidden = self._forward(batch)
        is_finite = _finite_sequences(hidden, inputs.cu_seqlens_q)
        token_ids = np.full(len(output.slots), -1, np.int32)
        logprobs: dict[RequestId, TokenLogprob] = {}
        forward_s, sample_s = watch.lap(), 0.0
        sampling = np.flatnonzero(output.samples)
        for part in _parts(len(sampling), max(1, _LOGITS_ELEMENTS // self._model.vocab_size)):
            entries = sampling[part]
            logits = self._compute_logits(hidden[torch.from_numpy(inputs.logits_indices[part])])
            forward_s += watch.lap()
            slots = output.slots[entries]
            sampled = self._sampler.sample(logits, slots, inputs.seq_lens[entries].astype(np.int64))
            token_ids[entries] = sampled.token_ids
            is_finite[entries] &= sampled.is_finite
            logprobs.update((self._request(slots[row]).id, entry) for row, entry in sampled.logprobs.items())
            sample_s += watch.lap()
        scores = list(self._score_prompts(output, inputs, hidden))
        self._batch.append_sampled(output.slots, token_ids)
        result = StepResult(output.step_id, token_ids, is_finite)
        return StepOutput(result, logprobs, scores, forward_s, sample_s + watch.lap())

    def _forward(self, batch: ForwardBatch) -> Tensor:
        """Repeatable, other than what follows it: it only writes KV."""
        try:
            return self._model.forward(batch, self._cache, batch.prompt_lens)
        except (MemoryError, RuntimeError) as error:
            if _is_out_of_memory(error):
                raise _ForwardOutOfMemory(error.with_traceback(None)) from None  # its frames hold the activations
            raise

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

    def _score_prompts(self, output: SchedulerOutput, inputs: StepInputs, hidden: Tensor) -> Iterator[PromptChunk]:
        """Scores of the prompt tokens whose predecessors the step computes, for requests that ask for them."""
        for entry in np.flatnonzero(self._scores_prompt[output.slots]).tolist():
            request = self._request(output.slots[entry])
            start, first_row = int(output.num_computed_tokens[entry]), int(inputs.cu_seqlens_q[entry])
            count = min(int(output.num_scheduled_tokens[entry]), request.num_prompt_tokens - 1 - start)
            if count > 0:
                targets = request.prompt_token_ids[start + 1 : start + 1 + count].astype(np.int64)
                rows = hidden[first_row : first_row + count]
                token_ids = torch.from_numpy(targets).to(self._model.device)
                values = score_tokens(self._model.compute_logits, rows, token_ids, self._model.vocab_size)
                yield request.id, start, values.cpu().numpy()


class _ForwardOutOfMemory(Exception):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


def _join(output: SchedulerOutput, parts: list[StepOutput]) -> StepOutput:
    """The outcome of a step that ran in parts, which are sequences, or tokens where it has one sequence."""
    token_ids = np.concatenate([part.result.token_ids for part in parts])
    is_finite = np.concatenate([part.result.is_finite for part in parts])
    if len(output.slots) == 1:
        token_ids, is_finite = token_ids[-1:], np.array([is_finite.all()])
    return StepOutput(
        StepResult(output.step_id, token_ids, is_finite),
        {request_id: entry for part in parts for request_id, entry in part.logprobs.items()},
        [scores for part in parts for scores in part.prompt_scores],
        sum(part.forward_s for part in parts),
        sum(part.sample_s for part in parts),
    )


class _Stopwatch:
    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        last, self._last = self._last, time.perf_counter()
        return self._last - last


def _parts(size: int, part_size: int) -> Iterator[slice]:
    return (slice(start, start + part_size) for start in range(0, size, part_size))


@contextmanager
def _device_errors(output: SchedulerOutput) -> Iterator[None]:
    """Makes faults of the device and lack of memory errors that end the job with one line; others are bugs and stay."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        step = f"a step of {output.num_tokens} tokens in {len(output.slots)} sequences"
        if _is_out_of_memory(error):
            raise BatchInferError(
                f"out of memory in {step} ({text}): lower --max-num-batched-tokens, --max-num-seqs or --kv-cache-memory"
            ) from error
        if isinstance(error, torch.AcceleratorError):
            raise BatchInferError(f"the device failed in {step}: {text}") from error
        raise


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def _finite_sequences(hidden: Tensor, cu_seqlens_q: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Whether all hidden states of each sequence's tokens are finite, bool [num_seqs]."""
    is_finite = hidden.abs().amax(dim=-1).isfinite().cpu().numpy()  # a NaN is the maximum of its row
    return np.logical_and.reduceat(is_finite, cu_seqlens_q[:-1])
