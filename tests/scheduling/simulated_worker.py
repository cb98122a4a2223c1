"""A stand-in for the engine's model side: a KV cache of plain facts, written and verified by plain loops.

Each cell of the cache remembers the token, the position and the hash of the whole prefix that were written there. A
step verifies every cell that its attention would read, so a wrong block table, a block freed too early or a wrongly
shared block fails at once. The next token is a function of the prefix hash alone.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from batchinfer.cache.block_pool import BlockPool
from batchinfer.request import Request, RequestId, SamplingParams
from batchinfer.scheduler_output import SchedulerOutput, StepResult
from batchinfer.scheduling.scheduler import Scheduler
from batchinfer.sequence import Sequence

VOCAB = 50
EOS = 7
GARBAGE = 49


def extend_hash(prefix_hash: int, token: int) -> int:
    return (prefix_hash * 1_000_003 + token + 1) % (2**61 - 1)


def hash_tokens(tokens: Iterable[int]) -> int:
    prefix_hash = 1
    for token in tokens:
        prefix_hash = extend_hash(prefix_hash, token)
    return prefix_hash


def next_token(prefix_hash: int) -> int:
    return (prefix_hash >> 9) % (VOCAB - 1)  # never GARBAGE


def naive_completion(request: Request) -> list[int]:
    """What the request alone yields, by the plainest loop."""
    tokens = request.prompt_token_ids.tolist()
    prefix_hash, output = hash_tokens(tokens), []
    while len(output) < request.max_tokens:
        output.append(next_token(prefix_hash))
        prefix_hash = extend_hash(prefix_hash, output[-1])
        if output[-1] == EOS and not request.params.ignore_eos:
            break
    return output


def make_request(row: int, prompt: list[int], max_tokens: int, **params: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return Request(RequestId(0, row), np.array(prompt, np.int32), sampling, max_tokens, noise_key=row)


def make_sequence(row: int, prompt: list[int], max_tokens: int, **params: object) -> Sequence:
    return Sequence(make_request(row, prompt, max_tokens, **params), arrival_time=0.0)


@dataclass
class Row:
    request: Request
    tokens: list[int]
    hashes: list[int]  # hashes[p] covers tokens[: p + 1]
    blocks: list[int]
    num_computed: int


@dataclass
class SimulatedWorker:
    """breaks(request, start, stop): whether computing these positions yields a non-finite number.
    silent: a sequence that reads broken KV does not notice; its numbers are finite and wrong."""

    num_blocks: int
    block_size: int
    breaks: Callable[[Request, int, int], bool] = lambda request, start, stop: False
    silent: bool = False
    rows: dict[int, Row] = field(default_factory=dict)
    cells: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # cell -> (token, position, prefix hash)
    broken: set[int] = field(default_factory=set)  # cells
    num_shared_in_step: int = 0  # cells read that another sequence wrote in the same step

    def execute(self, output: SchedulerOutput) -> StepResult:
        self._apply(output)
        starts, counts = output.num_computed_tokens.tolist(), output.num_scheduled_tokens.tolist()
        entries = [
            (self.rows[slot], start, start + count)
            for slot, start, count in zip(output.slots.tolist(), starts, counts, strict=True)
        ]
        writers: dict[int, int] = {}
        for row, start, stop in entries:
            self._write(row, start, stop, writers)
        token_ids, is_finite = [], []
        for (row, start, stop), samples in zip(entries, output.samples.tolist(), strict=True):
            token, finite = self._attend(row, start, stop, writers)
            row.num_computed = stop
            assert samples == (stop == len(row.tokens) and row.request.max_tokens > 0)
            if samples:
                append(row, token)
            token_ids.append(token if samples else -1)
            is_finite.append(finite)
        return StepResult(output.step_id, np.array(token_ids, np.int32), np.array(is_finite))

    def _apply(self, output: SchedulerOutput) -> None:
        for slot in output.released_slots:
            del self.rows[slot]
        for started in output.started:
            assert started.slot not in self.rows
            assert (started.token_ids >= 0).all()
            row = Row(started.request, [], [], started.block_ids.tolist(), started.num_computed_tokens)
            for token in started.token_ids.tolist():
                append(row, token)
            self.rows[started.slot] = row
        for slot, place, block in output.appended_blocks.T.tolist():
            assert place == len(self.rows[slot].blocks)
            self.rows[slot].blocks.append(block)

    def _cell(self, row: Row, position: int) -> int:
        return row.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, row: Row, start: int, stop: int, writers: dict[int, int]) -> None:
        assert start == row.num_computed, "each token is computed exactly once"
        assert start < stop <= len(row.tokens)
        for position in range(start, stop):
            cell = self._cell(row, position)
            assert cell not in writers, "two sequences write to one cell"
            writers[cell] = id(row)
            self.cells[cell] = (row.tokens[position], position, row.hashes[position])
            self.broken.discard(cell)

    def _attend(self, row: Row, start: int, stop: int, writers: dict[int, int]) -> tuple[int, bool]:
        """The token after position stop - 1, and whether the numbers were finite."""
        cells = [self._cell(row, position) for position in range(stop)]
        self.num_shared_in_step += sum(writers.get(cell, id(row)) != id(row) for cell in cells)
        for position, cell in enumerate(cells):
            assert self.cells[cell] == (row.tokens[position], position, row.hashes[position]) or cell in self.broken
        breaks = self.breaks(row.request, start, stop)
        reads_broken = any(cell in self.broken for cell in cells)
        if not breaks and not reads_broken:
            return next_token(row.hashes[stop - 1]), True
        self.broken.update(cells[start:])
        return GARBAGE, self.silent and not breaks


def append(row: Row, token: int) -> None:
    row.tokens.append(token)
    row.hashes.append(extend_hash(row.hashes[-1] if row.hashes else 1, token))


@dataclass
class Run:
    """Drives a scheduler and a worker as an engine would, with up to k steps in flight and random delays."""

    scheduler: Scheduler
    pool: BlockPool
    worker: SimulatedWorker
    max_num_batched_tokens: int
    rng: random.Random
    num_steps: int = 0
    failed: list[Sequence] = field(default_factory=list)
    in_flight: deque[tuple[SchedulerOutput, set[int]]] = field(default_factory=deque)
    results: deque[StepResult] = field(default_factory=deque)  # of executed steps

    def finish_all(self, arriving: list[Sequence]) -> None:
        arriving = list(arriving)
        idle = 0
        while arriving or self.scheduler.has_unfinished or self.in_flight:
            if arriving and self.rng.random() < 0.5:
                self.scheduler.add(arriving.pop(0))
            progressed = self.schedule() if self.rng.random() < 0.6 else False
            if self.rng.random() < 0.5 or not progressed:
                progressed = self.execute() or progressed
            if self.rng.random() < 0.5 or not progressed:
                progressed = self.commit() or progressed
            self.check()
            idle = 0 if progressed else idle + 1
            assert idle < 200, "nothing moves any more"
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.pool.num_used_blocks == 0

    def schedule(self) -> bool:
        output = self.scheduler.schedule()
        if output is None:
            return False
        assert 0 < output.num_tokens <= self.max_num_batched_tokens
        assert len(set(output.slots.tolist())) == len(output.slots)
        new_blocks = set(output.appended_blocks[2].tolist())
        for started in output.started:
            new_blocks.update(started.block_ids[started.num_computed_tokens // self.pool.block_size :].tolist())
        for _, still_read in self.in_flight:
            assert not new_blocks & still_read, "a block was given away while a step in flight reads it"
        tables = [self.scheduler._table.blocks_of(slot).tolist() for slot in output.slots.tolist()]
        self.in_flight.append((output, {block for table in tables for block in table}))
        self.num_steps += 1
        return True

    def execute(self) -> bool:
        if len(self.results) == len(self.in_flight):
            return False
        self.results.append(self.worker.execute(self.in_flight[len(self.results)][0]))
        return True

    def commit(self) -> bool:
        if not self.results:
            return False
        output, _ = self.in_flight.popleft()
        outcome = self.scheduler.commit(output, self.results.popleft())
        self.failed.extend(outcome.faulty)
        for sequence, token in outcome.sampled:
            if token == EOS and not sequence.request.params.ignore_eos:
                self.scheduler.finish(sequence, "stop")
            elif len(sequence.output_token_ids) == sequence.request.max_tokens:
                self.scheduler.finish(sequence, "length")
        return True

    def check(self) -> None:
        self.pool.check_integrity()
        table = self.scheduler._table
        tables = [table.blocks_of(slot).tolist() for slot in range(len(table.sequences))]
        references = np.bincount([b for table in tables for b in table], minlength=self.pool.num_blocks)
        assert references.tolist() == [self.pool.ref_count(b) for b in range(self.pool.num_blocks)]
