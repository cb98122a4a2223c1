"""A job's steps by the real scheduler and block pool, with made-up tokens and no model. Called by forecast.py for jobs
of which that takes seconds."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from batchinfer.cache.block_pool import BlockPool
from batchinfer.config import SchedulerConfig
from batchinfer.engine.stats import attention_work
from batchinfer.planning.step_trace import Forecast, StepTrace
from batchinfer.request import Request
from batchinfer.scheduler_output import SchedulerOutput, StepResult
from batchinfer.scheduling.intake import Intake
from batchinfer.scheduling.scheduler import Scheduler
from batchinfer.scheduling.window import Window
from batchinfer.sequence import Sequence as RunningSequence

_FIRST_TOKEN = 2**30  # beyond any vocabulary


class CacheBlocks(NamedTuple):
    """The block pool of a run."""

    num_blocks: int
    block_size: int
    enable_prefix_caching: bool


def simulate(
    requests: Sequence[Request],
    expected_tokens: Iterable[int],
    config: SchedulerConfig,
    blocks: CacheBlocks,
    layers_by_window: Mapping[int | None, int],
    max_model_len: int,
) -> Forecast:
    """requests: in the order of the input, a row's samples one after the other. expected_tokens: that each generates,
    at most its max_tokens. layers_by_window: how many layers attend to so many tokens at most, None being all."""
    pool = BlockPool(*blocks)
    scheduler = Scheduler(config, pool, max_model_len=max_model_len)
    expected = {request.id: tokens for request, tokens in zip(requests, expected_tokens, strict=True)}
    sequences: list[RunningSequence] = []  # started or waiting to

    def start(row: list[Request]) -> None:
        for request in row:
            sequences.append(RunningSequence(request, 0.0))
            scheduler.add(sequences[-1])

    window = Window(config, blocks.block_size, scheduler.expected_output_tokens)
    window.add(requests)  # as where the reader is never behind
    intake = Intake(config, window, lambda: scheduler.num_waiting, start)
    recorder = _Recorder(layers_by_window)
    tokens = count(_FIRST_TOKEN)  # no two alike, so that no completion is taken for another one's beginning
    while len(window) or scheduler.has_unfinished:
        intake.top_up()
        output = scheduler.schedule()
        assert output is not None, "the scheduler has unfinished requests but runs none of them"
        recorder.add(output, pool.num_used_blocks)
        for sequence, token in scheduler.commit(output, _made_up(output, tokens)).sampled:
            if token == -1 or len(sequence.output_tokens) >= expected[sequence.request.id]:
                scheduler.finish(sequence, "length")
                intake.num_finished += 1
    return recorder.forecast(sequences, scheduler.num_recomputed_tokens)


def _made_up(output: SchedulerOutput, tokens: "count[int]") -> StepResult:
    sampled = [next(tokens) if samples else -1 for samples in output.samples.tolist()]
    return StepResult(output.step_id, np.array(sampled, np.int32), np.ones(len(sampled), np.bool_))


class _Recorder:
    """Adds up steps as they are scheduled."""

    def __init__(self, layers_by_window: Mapping[int | None, int]) -> None:
        self._layers_by_window = layers_by_window
        self._steps: list[tuple[float, ...]] = []

    def add(self, output: SchedulerOutput, used_blocks: int) -> None:
        scheduled = output.num_scheduled_tokens.astype(np.int64)
        work = attention_work(output.num_computed_tokens, scheduled, self._layers_by_window)
        sizes = (len(scheduled), int(scheduled.sum()), int(output.samples.sum()))
        self._steps.append((1.0, *sizes, *work, used_blocks))

    def forecast(self, sequences: Sequence[RunningSequence], recomputed_tokens: int) -> Forecast:
        steps = np.array(self._steps, np.float64).reshape(-1, 7).T
        trace = StepTrace(*steps)
        cached = sum(sequence.num_cached_tokens for sequence in sequences)
        outputs = sum(len(sequence.output_tokens) for sequence in sequences)
        return Forecast(
            trace,
            preemptions=sum(sequence.num_preemptions for sequence in sequences),
            recomputed_tokens=recomputed_tokens,
            cached_tokens=cached,
            output_tokens=outputs,
            is_exact=True,
        )
