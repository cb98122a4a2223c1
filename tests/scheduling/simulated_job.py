"""A whole job by the real loop, window and scheduler, with made-up tokens and no model: what each step held."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from batchinfer.cache.block_pool import BlockPool
from batchinfer.config import SchedulerConfig
from batchinfer.data.feeder import Feeder
from batchinfer.engine.engine import Engine
from batchinfer.executors.loop import Discard, run_loop
from batchinfer.request import Request, RequestId, Result, SamplingParams
from batchinfer.scheduler_output import StepResult
from batchinfer.scheduling.scheduler import Scheduler
from batchinfer.sequence import Sequence

BLOCK_SIZE = 16
FIRST_TOKEN = 1 << 20  # of answers: no two tokens are alike, and none is in a prompt


@dataclass(frozen=True)
class JobRow:
    prompt: list[int]
    length: int  # of its answer
    max_tokens: int | None = None  # None: the length itself is known in advance


@dataclass
class SimulatedEngine:
    """Row r ends after rows[r].length tokens."""

    rows: Rows[JobRow]
    config: SchedulerConfig
    pool: BlockPool
    max_model_len: int
    block_size: int = BLOCK_SIZE
    sequences: list[Sequence] = field(default_factory=list)
    started: list[int] = field(default_factory=list)  # rows in the order of their first start
    running: list[int] = field(default_factory=list)  # by step
    tokens: list[int] = field(default_factory=list)
    num_ended: list[int] = field(default_factory=list)  # before the step
    peak: int = 0  # blocks

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, self.pool, max_model_len=self.max_model_len)
        self.expected_output_tokens = self.scheduler.expected_output_tokens
        self.next_token = FIRST_TOKEN

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self.scheduler.num_running

    def add(self, request: Request) -> None:
        self.sequences.append(Sequence(request, 0.0))
        self.scheduler.add(self.sequences[-1])

    def step(self) -> list[Result]:
        output = self.scheduler.schedule()
        assert output is not None
        self.running.append(self.num_running)
        self.tokens.append(output.num_tokens)
        self.num_ended.append(self._ended)
        self.peak = max(self.peak, self.pool.num_used_blocks)
        self.started += [s.request.id.row for s in output.started if s.request.id.row not in self._seen]
        self._seen.update(s.request.id.row for s in output.started)
        count = len(output.slots)
        token_ids = np.arange(self.next_token, self.next_token + count, dtype=np.int32)
        self.next_token += count
        token_ids[~output.samples] = -1
        results = []
        for sequence, _ in self.scheduler.commit(
            output, StepResult(output.step_id, token_ids, np.ones(count, bool))
        ).sampled:
            if len(sequence.output_tokens) == self.rows[sequence.request.id.row].length:
                self.scheduler.finish(sequence, "stop")
                results.append(Result(sequence.request.id, "stop"))
        self._ended += len(results)
        return results

    _ended: int = 0
    _seen: set[int] = field(default_factory=set)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(row.prompt) for row in self.rows)

    @property
    def needed_tokens(self) -> int:
        """Without any cache or preemption: prompts, and all answers but their last tokens."""
        return self.prompt_tokens + sum(row.length - 1 for row in self.rows)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were served when the sequences first started."""
        return sum(sequence.num_cached_tokens for sequence in self.sequences)

    @property
    def recomputed_tokens(self) -> int:
        return sum(self.tokens) + self.cached_tokens - self.needed_tokens


@dataclass
class SimulatedFeeder:
    """Brings rows as the real one does: few at first, then more at a time, one batch a step."""

    rows: Rows[JobRow]
    max_model_len: int
    place: int = 0
    batch: int = 32
    waits: bool = False  # whether it has brought a batch since the last step

    @property
    def is_exhausted(self) -> bool:
        return self.place == len(self.rows)

    def take(self, wait: bool) -> list[Request]:
        self.waits = not self.waits
        if not self.waits and not wait:
            return []
        rows = self.rows[self.place : self.place + self.batch]
        requests = [self._request(self.place + i, row) for i, row in enumerate(rows)]
        self.place += len(rows)
        self.batch = min(2 * self.batch, 512)
        return requests

    def _request(self, number: int, row: JobRow) -> Request:
        max_tokens = row.length if row.max_tokens is None else row.max_tokens
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=row.max_tokens is None)
        return Request(RequestId(0, number), np.array(row.prompt, np.int32), params, max_tokens, 0)


def simulate_job(rows: Rows[JobRow], num_blocks: int, max_model_len: int = 1024, **options: object) -> SimulatedEngine:
    config = SchedulerConfig(**options)  # type: ignore[arg-type]
    engine = SimulatedEngine(rows, config, BlockPool(num_blocks, BLOCK_SIZE), max_model_len)
    feeder = SimulatedFeeder(rows, max_model_len)
    run_loop(cast(Engine, engine), cast(Feeder, feeder), Discard(), config, lambda: None)
    assert all(len(s.output_tokens) == rows[s.request.id.row].length for s in engine.sequences)
    assert len(engine.sequences) == len(rows)
    engine.pool.check_integrity()
    assert engine.pool.num_used_blocks == 0
    return engine
