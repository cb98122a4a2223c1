"""What static batching and contiguous reservation are: checked on whole runs, step by step."""

import random

import numpy as np
import pytest
from simulated_worker import Run, SimulatedWorker, make_sequence, naive_completion

from batchinfer.cache.block_pool import BlockPool
from batchinfer.config import SchedulerConfig
from batchinfer.scheduler_output import SchedulerOutput, StepResult
from batchinfer.scheduling.scheduler import Scheduler
from batchinfer.sequence import Sequence, SequenceStatus

BLOCK_SIZE = 4


def make_scheduler(num_blocks: int, max_model_len: int = 64, **options: object) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    config = SchedulerConfig(**{"max_num_batched_tokens": 64, "max_num_seqs": 8} | options)  # type: ignore[arg-type]
    return Scheduler(config, pool, max_model_len=max_model_len), pool


def random_sequences(rng: random.Random, count: int) -> list[Sequence]:
    beginning = [rng.randrange(40) for _ in range(9)]
    prompts = [
        beginning[: rng.choice([0, 9])] + [rng.randrange(40) for _ in range(rng.randrange(1, 9))] for _ in range(count)
    ]
    return [make_sequence(row, prompt, rng.choice([1, 3, 30])) for row, prompt in enumerate(prompts)]


def drive(scheduler: Scheduler, finished_by: dict[int, int]) -> list[tuple[SchedulerOutput, list[int]]]:
    """Runs to the end; row r ends after finished_by[r] tokens. Returns each step with the rows that ended after it."""
    steps = []
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        assert output is not None
        token_ids = np.where(output.samples, 1, -1).astype(np.int32)
        outcome = scheduler.commit(output, StepResult(output.step_id, token_ids, np.ones(len(token_ids), bool)))
        ended = [s for s, _ in outcome.sampled if len(s.output_token_ids) == finished_by[s.request.id.row]]
        for sequence in ended:
            scheduler.finish(sequence, "length")
        steps.append((output, [s.request.id.row for s in ended]))
    return steps


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kv_allocation", ["paged", "contiguous"])
def test_static_batches_start_in_order_and_never_overlap(seed: int, kv_allocation: str) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 3, 8])
    scheduler, _ = make_scheduler(1000, batching="static", kv_allocation=kv_allocation, max_num_seqs=size)
    sequences = random_sequences(rng, 20)
    for sequence in sequences:
        scheduler.add(sequence)
    steps = drive(scheduler, {s.request.id.row: s.request.max_tokens for s in sequences})
    started: list[int] = []
    running: set[int] = set()
    for output, ended in steps:
        new = [start.request.id.row for start in output.started]
        batch = len(started) // size
        assert all(row // size == batch or not running for row in new)
        started += new
        running = running.union(new).difference(ended)
    assert started == list(range(20))
    # Memory is ample, so each batch lasts for the steps of its prompts and of its longest answer.
    first = [
        next(i for i, (o, _) in enumerate(steps) if any(s.request.id.row == r for s in o.started)) for r in started
    ]
    for batch_start in range(0, 20, size):
        before = {row for _, ended in steps[: first[batch_start]] for row in ended}
        assert before == set(range(batch_start))


def test_a_static_batch_that_memory_cuts_short_is_not_refilled() -> None:
    scheduler, _ = make_scheduler(10, batching="static", admission="greedy", max_num_seqs=4)
    for row in range(6):
        scheduler.add(make_sequence(row, [row] * 16, 2, ignore_eos=True))  # four blocks and one more
    steps = drive(scheduler, dict.fromkeys(range(6), 2))
    groups = [[s.request.id.row for s in output.started] for output, _ in steps if output.started]
    assert groups == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("options", [{"batching": "static"}, {"kv_allocation": "contiguous"}, {"admission": "greedy"}])
@pytest.mark.parametrize("seed", range(10))
def test_every_sequence_gets_exactly_its_tokens(seed: int, options: dict[str, str], in_flight: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(rng.choice([12, 20, 60]), BLOCK_SIZE)
    config = SchedulerConfig(max_num_batched_tokens=rng.choice([3, 40]), max_num_seqs=rng.choice([2, 5]), **options)
    scheduler = Scheduler(config, pool, in_flight, max_model_len=48)
    run = Run(scheduler, pool, SimulatedWorker(pool.num_blocks, BLOCK_SIZE), config.max_num_batched_tokens, rng)
    sequences = random_sequences(rng, 20)
    run.finish_all(sequences)
    assert [s.output_token_ids for s in sequences] == [naive_completion(s.request) for s in sequences]
    assert all(s.status is SequenceStatus.FINISHED for s in sequences)


@pytest.mark.parametrize("seed", range(10))
def test_a_reservation_is_max_model_len_from_start_to_end(seed: int) -> None:
    rng = random.Random(seed)
    max_model_len = rng.choice([47, 48, 49])
    reserved = {47: 12, 48: 12, 49: 13}[max_model_len]
    scheduler, pool = make_scheduler(5 * 13 + rng.randrange(-8, 8), max_model_len, kv_allocation="contiguous")
    sequences = random_sequences(rng, 30)
    for sequence in sequences:
        scheduler.add(sequence)
    most = 0
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        assert output is not None
        assert output.appended_blocks.shape == (3, 0)
        assert all(len(start.block_ids) == reserved for start in output.started)
        assert pool.num_used_blocks == reserved * scheduler.num_running
        pool.check_integrity()
        most = max(most, scheduler.num_running)
        token_ids = np.where(output.samples, 1, -1).astype(np.int32)
        outcome = scheduler.commit(output, StepResult(output.step_id, token_ids, np.ones(len(token_ids), bool)))
        for sequence, _ in outcome.sampled:
            if len(sequence.output_token_ids) == sequence.request.max_tokens:
                scheduler.finish(sequence, "length")
    assert most == min(8, pool.num_blocks // reserved)
    assert all(s.num_preemptions == 0 and s.num_cached_tokens == 0 for s in sequences)


def test_a_reservation_needs_a_length() -> None:
    config = SchedulerConfig(kv_allocation="contiguous")
    with pytest.raises(ValueError, match="max_model_len = None"):
        Scheduler(config, BlockPool(10, 4))
