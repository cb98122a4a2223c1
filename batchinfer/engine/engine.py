"""The step loop: requests in, results out. Knows neither files nor devices; the scheduler decides what runs, the model
runner runs it, stop rules end it. Built by executors/, driven by the pipeline."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.cache.block_pool import BlockPool, key_domain
from batchinfer.config import SchedulerConfig
from batchinfer.engine.completion import Completion, error_result
from batchinfer.engine.cuda_graphs import GraphPlan
from batchinfer.engine.device_queue import DeviceQueue, ImmediateQueue
from batchinfer.engine.key_stacks import KeyStacks
from batchinfer.engine.model import Model
from batchinfer.engine.model_runner import ModelRunner
from batchinfer.engine.stats import EngineStats, request_times, token_gaps_ms
from batchinfer.engine.step_in_flight import StepHandle, StepOutput
from batchinfer.engine.stopping import Stop, TextDecoder
from batchinfer.errors import BatchInferError, ErrorCode, RowError
from batchinfer.request import Request, RequestId, Result
from batchinfer.scheduler_output import SchedulerOutput, StepResult
from batchinfer.scheduling.scheduler import Scheduler
from batchinfer.sequence import Sequence

_SCORED = Stop("length", None, 0)  # max_tokens 0: the prompt was scored, nothing was to be generated
_NOT_FINITE = "the model's numbers became NaN or infinite; the row's KV was dropped"


@dataclass(slots=True)
class _Submitted:
    """A step between its scheduling and its commit."""

    output: SchedulerOutput
    handle: StepHandle | None = None  # once the runner has it


class Engine:
    """One model on one device.

    eos_token_ids: any of them ends a sequence. max_model_len: prompt and completion of a request fit in it.
    rope_length_threshold: the KV of longer prompts depends on their length, so only equally long ones share it.
    sliding_windows: of each layer, how many tokens it attends to at most, None for all; for the statistics.
    max_steps_in_flight: steps submitted before the first is awaited. queue: how the device gets its work, by default as
    a CPU does. graphs: what decode steps are captured with; None: they are launched kernel by kernel. key_stacks: finds
    what sequences attend to together; None: the device finds it by itself, or not.
    Raises ValueError where the block pool cannot hold one sequence of max_model_len.
    """

    def __init__(
        self,
        model: Model,
        cache: Any,
        block_pool: BlockPool,
        tokenizer: TextDecoder,
        scheduler_config: SchedulerConfig,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        max_steps_in_flight: int = 1,
        rope_length_threshold: int | None = None,
        sliding_windows: Iterable[int | None] = (None,),
        clock: Callable[[], float] = time.monotonic,
        queue: DeviceQueue | None = None,
        graphs: GraphPlan | None = None,
        key_stacks: KeyStacks | None = None,
    ) -> None:
        capacity = block_pool.num_blocks * block_pool.block_size
        if max_model_len > capacity:
            raise ValueError(f"max_model_len = {max_model_len}: must be at most the {capacity} tokens of the KV cache")
        self.max_model_len = max_model_len
        self.block_size = block_pool.block_size
        self.vocab_size = model.vocab_size
        self.stats = EngineStats(block_pool.num_blocks, Counter(sliding_windows))
        self._block_pool = block_pool
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._max_steps_in_flight = max_steps_in_flight
        self._rope_length_threshold = rope_length_threshold
        self._clock = clock
        self._scheduler = Scheduler(scheduler_config, block_pool, max_steps_in_flight, clock, max_model_len)
        sizes = (scheduler_config.max_num_seqs, max_model_len, block_pool.block_size)
        self._runner = ModelRunner(
            model, cache, *sizes, eos_token_ids, queue or ImmediateQueue(), max_steps_in_flight, graphs, key_stacks
        )
        self._max_num_batched_tokens = scheduler_config.max_num_batched_tokens
        self._completions: dict[RequestId, Completion] = {}
        self._steps: deque[_Submitted] = deque()  # in flight, oldest first
        self._results: list[Result] = []  # not yet handed out by step()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._completions or self._steps or self._results)

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    def warm_up(self) -> None:
        """To be called before the first step where the device's kernels are compiled on their first use."""
        self._runner.warm_up(self._max_num_batched_tokens)

    def expected_output_tokens(self, requests: list[Request]) -> npt.NDArray[np.float64]:
        """How long the answers to requests that have not begun are likely to be [num_requests]."""
        return self._scheduler.expected_output_tokens(requests)

    def add(self, request: Request, arrival_time: float | None = None) -> None:
        """Queues a request; its Result comes from a later step(), an error where the request cannot run at all.

        arrival_time: seconds of the engine's clock, default now. Raises ValueError where a request of the same id runs.
        """
        try:
            self._check(request)
        except RowError as error:
            self._results.append(error_result(request, error.code, error.message))
            return
        now = self._clock() if arrival_time is None else arrival_time
        sequence = Sequence(request, now, self._cache_domain(request.num_prompt_tokens))
        completion = Completion(sequence, self._eos_token_ids, self._tokenizer)
        if self._completions.setdefault(request.id, completion) is not completion:
            raise ValueError(f"request {request.id} is running already")
        self._scheduler.add(sequence)

    def _cache_domain(self, prompt_len: int) -> str:
        threshold = self._rope_length_threshold
        return "" if threshold is None or prompt_len <= threshold else key_domain(prompt_len=str(prompt_len))

    def drop_unstarted(self) -> None:
        """Forgets the requests of rows of which no token has been computed; they get no Result. A row's first sample is
        the first to start."""
        unstarted = {
            (request_id.shard, request_id.row)
            for request_id, completion in self._completions.items()
            if request_id.sample == 0 and completion.sequence.first_scheduled_time is None
        }
        for request_id, completion in list(self._completions.items()):
            if (request_id.shard, request_id.row) in unstarted:
                self._scheduler.abort(completion.sequence)
                del self._completions[request_id]

    def abandon(self) -> None:
        """Forgets every request and what they have computed; they get no Result. Also after `step` was interrupted."""
        for completion in self._completions.values():
            self._scheduler.abort(completion.sequence)
        self._completions.clear()
        self._results.clear()
        self._runner.forget()
        while self._steps:
            output, size = self._steps[0].output, len(self._steps[0].output.slots)
            # As if its numbers had broken: what the step was to write must not be found in the prefix cache.
            nothing = StepResult(output.step_id, np.zeros(size, np.int32), np.zeros(size, np.bool_))
            self._scheduler.commit(output, nothing)
            self._steps.popleft()

    def step(self) -> list[Result]:
        """Submits a step, takes in the oldest one in flight where no more may be, and returns the requests that this
        finished, in no particular order.

        Raises BatchInferError where the device fails; what had finished before is safe with the caller.
        """
        output = self._schedule()
        self._submit(output)
        if output is None or len(self._steps) == self._max_steps_in_flight:
            self._commit()
        results, self._results = self._results, []
        return results

    def _schedule(self) -> SchedulerOutput | None:
        with self.stats.timed("schedule_s"):
            output = self._scheduler.schedule()
        if output is None and not self._steps and self._completions:
            raise BatchInferError("the scheduler has unfinished requests but runs none of them")
        return output

    def _submit(self, output: SchedulerOutput | None) -> None:
        if output is not None:
            self._steps.append(_Submitted(output))
            self._steps[-1].handle = self._runner.submit(output)
            started = [self._completions[start.request.id].sequence for start in output.started]
            restarts = [sequence.num_preemptions > 0 for sequence in started]
            self.stats.recomputed_tokens = self._scheduler.num_recomputed_tokens
            self.stats.add_step(output, restarts, self._scheduler.num_waiting, self._block_pool.num_used_blocks)

    def _commit(self) -> None:
        """Takes in the oldest step in flight."""
        if not self._steps:
            return
        output, handle = self._steps[0].output, self._steps[0].handle
        assert handle is not None, "a step that could not be submitted leaves the engine to be abandoned"
        step = handle.result()
        self.stats.forward_s += step.forward_s
        self.stats.sample_s += step.sample_s
        with self.stats.timed("postprocess_s"):
            self._postprocess(output, step)

    def _postprocess(self, output: SchedulerOutput, step: StepOutput) -> None:
        outcome = self._scheduler.commit(output, step.result)
        self._steps.popleft()
        now = self._clock()
        for sequence in outcome.faulty:
            del self._completions[sequence.request.id]
            self._results.append(error_result(sequence.request, ErrorCode.NUMERICAL, _NOT_FINITE))
        for request_id, start, values in step.prompt_scores:
            self.stats.scored_tokens += len(values)
            if request_id in self._completions:  # it may have ended while the step was in flight
                self._completions[request_id].add_prompt_scores(start, values)
        for sequence, token_id in outcome.sampled:
            self._take_token(sequence, token_id, step, now)

    def _take_token(self, sequence: Sequence, token_id: int, step: StepOutput, now: float) -> None:
        request_id = sequence.request.id
        stop: Stop | None = _SCORED
        if token_id >= 0:
            sequence.token_times.append(now)
            self.stats.sampled_tokens += 1
            stop = self._completions[request_id].add_token(step.logprobs.get(request_id))
        if stop is not None:
            self._finish(self._completions.pop(request_id), stop, now)

    def _finish(self, completion: Completion, stop: Stop, now: float) -> None:
        sequence = completion.sequence
        self._scheduler.finish(sequence, stop.finish_reason, stop.stop_reason)
        gaps_ms = token_gaps_ms(sequence.token_times)
        self.stats.add_token_gaps(gaps_ms)
        self._results.append(completion.result(stop, request_times(sequence, gaps_ms, now)))

    def _check(self, request: Request) -> None:
        """Raises RowError for what would read or write out of bounds, or never end."""
        prompt, params = request.prompt_token_ids, request.params
        if not len(prompt):
            raise RowError(ErrorCode.EMPTY_PROMPT, "the prompt has no tokens")
        if int(prompt.min()) < 0 or int(prompt.max()) >= self.vocab_size:
            raise RowError(ErrorCode.BAD_PROMPT, f"token ids must be from 0 to {self.vocab_size - 1}")
        if len(prompt) + request.max_tokens > self.max_model_len:
            raise RowError(
                ErrorCode.PROMPT_TOO_LONG,
                f"{len(prompt)} prompt tokens and max_tokens {request.max_tokens} exceed max_model_len "
                f"{self.max_model_len}",
            )
        ids = {"logit_bias": [token_id for token_id, _ in params.logit_bias], "stop_token_ids": params.stop_token_ids}
        for name, token_ids in ids.items():
            for token_id in token_ids:
                if not 0 <= token_id < self.vocab_size:
                    message = f"{name} = {token_id}: must be a token id from 0 to {self.vocab_size - 1}"
                    raise RowError(ErrorCode.BAD_PARAMETER, message)
