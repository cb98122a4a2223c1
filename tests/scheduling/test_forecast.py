"""Admission by forecast, against plain simulations of every step."""

import random

import numpy as np
import pytest
from simulated_worker import Run, SimulatedWorker, make_sequence, naive_completion

from batchinfer.cache.block_pool import BlockPool
from batchinfer.config import SchedulerConfig
from batchinfer.scheduler_output import StepResult
from batchinfer.scheduling.scheduler import Scheduler
from batchinfer.scheduling.usage import Growing, Room, Usage
from batchinfer.sequence import Sequence

Member = tuple[int, int, int]  # tokens, growth, uncounted blocks


def simulated_usage(members: list[Member], step: int, size: int) -> int:
    """Blocks in use at a step."""
    living = [member for member in members if member[1] >= step]
    return sum(-(-(tokens + step) // size) - uncounted for tokens, _, uncounted in living)


def simulated_peak(members: list[Member], size: int) -> int:
    """The most blocks in use at any step, by stepping."""
    return max(simulated_usage(members, step, size) for step in range(max(growth for _, growth, _ in members) + 1))


def random_members(rng: random.Random, count: int, size: int) -> list[Member]:
    tokens = [rng.randrange(1, 80) for _ in range(count)]
    growth = [rng.choice([0, 1, rng.randrange(100)]) for _ in range(count)]
    return [(t, g, rng.randrange(-(-t // size))) for t, g in zip(tokens, growth, strict=True)]


def growing(members: list[Member], size: int) -> Growing:
    tokens, growth, uncounted = np.array(members, np.int64).reshape(-1, 3).T
    return Growing(tokens, growth, uncounted, size)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("size", [1, 4, 16])
def test_the_closed_form_is_the_usage_of_every_step(seed: int, size: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        members = random_members(rng, rng.randrange(1, 30), size)
        steps = np.arange(110)
        usage = growing(members, size).usage(steps)
        assert usage.blocks.tolist() == [simulated_usage(members, step, size) for step in steps]
        assert usage.num_alive.tolist() == [sum(growth >= step for _, growth, _ in members) for step in steps]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("size", [1, 4, 16])
def test_candidates_take_room_as_long_as_the_peak_of_every_step_fits(seed: int, size: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        running = random_members(rng, rng.randrange(12), size)
        candidates = random_members(rng, rng.randrange(1, 12), size)
        num_blocks = rng.randrange(1, 300)
        if running and simulated_peak(running, size) > num_blocks:
            continue
        moments = np.array(sorted(growth for _, growth, _ in running + candidates))
        room = Room(moments, num_blocks - growing(running, size).usage(moments).blocks, size)
        for candidate in candidates:
            fits = simulated_peak([*running, candidate], size) <= num_blocks
            assert room.take(*candidate) == fits
            running += [candidate] if fits else []


def test_spread_is_that_of_a_binomial_number_of_mean_sequences() -> None:
    sequences = growing([(1, 7, 0), (1, 3, 0), (1, 9, 0), (1, 5, 0)], 4)
    usage = Usage(np.array([80, 60, 40, 10]), np.array([4, 3, 2, 1]), np.zeros(4, np.int64))  # at 3, 5, 7 and 9
    uncertain = np.array([False, True, True, True])  # all but the one that ends at 7
    expected = [0, np.sqrt(2 * (1 / 3)) * 20, np.sqrt(1 * (2 / 3)) * 20, np.sqrt(1 * (2 / 3)) * 10]
    np.testing.assert_allclose(sequences.spread(usage, uncertain, 9), expected)
    assert not sequences.spread(usage, np.zeros(4, bool), 9).any()


def test_what_few_answers_tell_of_lengths_spreads_all_growth_alike() -> None:
    """From 15 answers a mean is known to a quarter of itself; of two sequences one is uncertain."""
    sequences = growing([(1, 3, 0), (1, 3, 0)], 1)
    usage = sequences.usage(np.array([3]))
    assert (usage.blocks.tolist(), usage.grown.tolist()) == ([8], [6])
    np.testing.assert_allclose(sequences.spread(usage, np.array([True, False]), 15), [6 / 2 / 4])


def make_scheduler(num_blocks: int, block_size: int = 4, **options: object) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks, block_size)
    config = SchedulerConfig(**{"max_num_batched_tokens": 64, "max_num_seqs": 64} | options)  # type: ignore[arg-type]
    return Scheduler(config, pool), pool


def ends_of(sequences: list[Sequence]) -> dict[int, int]:
    """How many tokens the simulated worker's rule gives each row."""
    return {s.request.id.row: len(naive_completion(s.request)) for s in sequences}


def drive(scheduler: Scheduler, ends: dict[int, int]) -> list[int]:
    """Runs to the end and returns the tokens of each step."""
    sizes = []
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        assert output is not None
        sizes.append(output.num_tokens)
        token_ids = np.where(output.samples, 1, -1).astype(np.int32)
        outcome = scheduler.commit(output, StepResult(output.step_id, token_ids, np.ones(len(token_ids), bool)))
        for sequence, _ in outcome.sampled:
            if len(sequence.output_token_ids) == ends[sequence.request.id.row]:
                scheduler.finish(sequence, "stop")
    return sizes


@pytest.mark.parametrize("seed", range(10))
def test_known_lengths_are_never_preempted_and_fill_the_pool(seed: int) -> None:
    """Prompts of one token each, so that all starts are in step, as the closed form assumes."""
    rng = random.Random(seed)
    sequences = [make_sequence(row, [row % 50], rng.randrange(1, 120), ignore_eos=True) for row in range(80)]
    scheduler, pool = make_scheduler(rng.randrange(60, 150), block_size=rng.choice([2, 4]))
    for sequence in sequences:
        scheduler.add(sequence)
    peak, ends = 0, {s.request.id.row: s.request.max_tokens for s in sequences}
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        assert output is not None
        peak = max(peak, pool.num_used_blocks)
        token_ids = np.where(output.samples, 1, -1).astype(np.int32)
        outcome = scheduler.commit(output, StepResult(output.step_id, token_ids, np.ones(len(token_ids), bool)))
        for sequence, _ in outcome.sampled:
            if len(sequence.output_token_ids) == ends[sequence.request.id.row]:
                scheduler.finish(sequence, "length")
    assert all(s.num_preemptions == 0 for s in sequences)
    assert peak >= 0.9 * pool.num_blocks


@pytest.mark.parametrize("seed", range(10))
def test_shared_blocks_count_once(seed: int) -> None:
    """The blocks that running sequences own, and those of `base`, are at each step the used ones of the pool."""
    rng = random.Random(seed)
    scheduler, pool = make_scheduler(60, max_num_batched_tokens=rng.choice([7, 64]), max_num_seqs=9)
    beginnings = [[first] * 13 for first in range(3)]
    sequences = [
        make_sequence(row, rng.choice(beginnings) + [rng.randrange(40)] * rng.randrange(1, 9), rng.randrange(1, 30))
        for row in range(40)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    ends, table = ends_of(sequences), scheduler._table
    seen_sharing = False
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        assert output is not None
        slots = table.in_admission_order()
        own, held = int(table.num_own[slots].sum()), int(table.num_blocks[slots].sum())
        distinct = len({b for slot in slots.tolist() for b in table.blocks_of(slot).tolist()})
        assert distinct == pool.num_used_blocks
        assert own <= distinct <= held
        seen_sharing |= distinct < held
        token_ids = np.where(output.samples, 1, -1).astype(np.int32)
        outcome = scheduler.commit(output, StepResult(output.step_id, token_ids, np.ones(len(token_ids), bool)))
        for sequence, _ in outcome.sampled:
            if len(sequence.output_token_ids) == ends[sequence.request.id.row]:
                scheduler.finish(sequence, "stop")
    assert seen_sharing


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_every_sequence_gets_its_tokens_where_lengths_surprise(seed: int, in_flight: int) -> None:
    """Limits are long and most answers short, then a few run on: some are preempted, none is lost."""
    rng = random.Random(seed)
    pool = BlockPool(14, 4)
    config = SchedulerConfig(max_num_batched_tokens=rng.choice([9, 64]), max_num_seqs=rng.choice([4, 20]))
    scheduler = Scheduler(config, pool, in_flight)
    run = Run(scheduler, pool, SimulatedWorker(14, 4), config.max_num_batched_tokens, rng)
    sequences = [
        make_sequence(row, [row % 50, row // 50, 3], 44, ignore_eos=row > 12 and row % 4 == 0) for row in range(24)
    ]
    run.finish_all(sequences)
    assert [s.output_token_ids for s in sequences] == [naive_completion(s.request) for s in sequences]


def test_the_victim_is_who_loses_least() -> None:
    scheduler, _ = make_scheduler(100, max_num_seqs=3)
    long, short = make_sequence(0, [1] * 20, 25), make_sequence(1, [2] * 10, 25)
    sharing = make_sequence(2, [1] * 22, 25)  # computes two tokens, and shares five blocks with the first
    for sequence in (long, short, sharing):
        scheduler.add(sequence)
    output = scheduler.schedule()
    assert output is not None
    assert output.num_scheduled_tokens.tolist() == [20, 10, 2]
    assert scheduler._admission.victim() is sharing
    scheduler.abort(sharing)
    assert scheduler._admission.victim() is short
