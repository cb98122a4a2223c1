"""What ordering, admission and batching gain on whole simulated jobs, in steps and tokens."""

import math
import random

import numpy as np
import pytest
from simulated_job import BLOCK_SIZE, JobRow, SimulatedEngine, simulate_job

AMPLE = 20_000  # blocks


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(40_000) for _ in range(count)]


def shared_prompt_rows(seed: int) -> list[JobRow]:
    """400 rows under 8 system prompts of 400 tokens, shuffled."""
    rng = random.Random(seed)
    heads = [random_tokens(rng, 400) for _ in range(8)]
    rows = [JobRow(heads[i % 8] + random_tokens(rng, rng.randrange(30, 70)), 32) for i in range(400)]
    rng.shuffle(rows)
    return rows


def heavy_tail_rows(seed: int, is_known: bool) -> list[JobRow]:
    """Lognormal answers (sigma 1, median 36), at most 900; max_tokens is the length, where that is known, else 900."""
    rng = random.Random(seed)
    lengths = [max(1, min(900, round(rng.lognormvariate(math.log(36), 1)))) for _ in range(400)]
    return [JobRow(random_tokens(rng, rng.randrange(20, 80)), n, None if is_known else 900) for n in lengths]


def shareable_tokens(rows: list[JobRow]) -> int:
    """Prompt tokens that a boundless prefix cache would serve: in full blocks, and never a prompt's last."""
    seen: set[tuple[int, ...]] = set()
    served = 0
    for row in rows:
        for stop in range(BLOCK_SIZE, len(row.prompt), BLOCK_SIZE):
            beginning = tuple(row.prompt[:stop])
            served += BLOCK_SIZE if beginning in seen else 0
            seen.add(beginning)
    return served


def working_set(rows: list[JobRow]) -> int:
    """Blocks of all rows at their ends, without sharing."""
    return sum(-(-(len(row.prompt) + row.length - 1) // BLOCK_SIZE) for row in rows)


def occupancy(job: SimulatedEngine, max_num_seqs: int, share_of_work: float = 0.95) -> float:
    """Mean of running sequences over those that could run at best, until that share of the work is done."""
    done = np.cumsum(job.tokens) / sum(job.tokens)
    unfinished = len(job.rows) - np.array(job.num_ended)
    possible = np.minimum(max_num_seqs, unfinished)
    return float((np.array(job.running) / possible)[: np.searchsorted(done, share_of_work)].mean())


@pytest.mark.parametrize("seed", range(2))
def test_shared_prompts_are_served_from_a_quarter_of_what_input_order_holds(seed: int) -> None:
    rows = shared_prompt_rows(seed)
    shareable = shareable_tokens(rows)
    assert shareable == (400 - 8) * 400
    ample = simulate_job(rows, AMPLE, max_num_seqs=64, order="input")
    assert ample.cached_tokens == shareable
    blocks = ample.peak // 4
    packed = simulate_job(rows, blocks, max_model_len=blocks * BLOCK_SIZE, max_num_seqs=64)
    plain = simulate_job(rows, blocks, max_model_len=blocks * BLOCK_SIZE, max_num_seqs=64, order="input")
    assert packed.cached_tokens >= 0.95 * shareable
    assert plain.cached_tokens < 0.7 * shareable
    assert sum(plain.tokens) >= 2 * sum(packed.tokens)
    assert len(plain.tokens) >= 2 * len(packed.tokens)
    assert packed.recomputed_tokens == 0


@pytest.mark.parametrize("seed", range(3))
def test_known_heavy_tails_leave_no_tail(seed: int) -> None:
    rows = heavy_tail_rows(seed, is_known=True)
    packed = simulate_job(rows, AMPLE, max_num_seqs=32)
    assert occupancy(packed, 32) >= 0.9
    # No schedule takes fewer steps than the longest answer, or than full batches need.
    least = max(max(row.length for row in rows), sum(row.length for row in rows) / 32)
    assert len(packed.tokens) <= 1.1 * least
    plain = simulate_job(rows, AMPLE, max_num_seqs=32, order="input")
    assert len(packed.tokens) <= len(plain.tokens)


@pytest.mark.parametrize("seed", range(3))
def test_continuous_batching_beats_static_in_the_same_order(seed: int) -> None:
    rows = heavy_tail_rows(seed, is_known=True)
    continuous = simulate_job(rows, AMPLE, max_num_seqs=32, order="input")
    static = simulate_job(rows, AMPLE, max_num_seqs=32, order="input", batching="static")
    assert continuous.started == static.started == list(range(400))
    assert len(static.tokens) >= 1.8 * len(continuous.tokens)
    longest = [max(row.length for row in rows[start : start + 32]) for start in range(0, 400, 32)]
    assert sum(longest) <= len(static.tokens) <= sum(longest) + len(longest)  # a batch's prompts may take two steps


@pytest.mark.parametrize("seed", range(3))
def test_pages_hold_at_least_twice_as_many_sequences_as_reservations(seed: int) -> None:
    rows = heavy_tail_rows(seed, is_known=True)
    blocks = working_set(rows) // 4
    paged = simulate_job(rows, blocks, order="input")
    reserved = simulate_job(rows, blocks, order="input", kv_allocation="contiguous")
    assert max(reserved.running) == blocks // (1024 // BLOCK_SIZE)
    assert np.mean(paged.running) >= 2 * np.mean(reserved.running)


@pytest.mark.parametrize("order", ["packed", "input"])
@pytest.mark.parametrize("seed", range(3))
def test_little_is_computed_twice_in_a_quarter_of_the_working_set(seed: int, order: str) -> None:
    known = heavy_tail_rows(seed, is_known=True)
    job = simulate_job(known, working_set(known) // 4, order=order)
    assert job.recomputed_tokens < 0.02 * sum(job.tokens)
    unknown = heavy_tail_rows(seed, is_known=False)
    job = simulate_job(unknown, working_set(unknown) // 4, order=order)
    assert job.recomputed_tokens < 0.02 * sum(job.tokens)


def geometric_rows(seed: int, mean: int) -> list[JobRow]:
    """Answers that end at each token with the same chance, so that the past of one tells nothing."""
    rng = random.Random(seed)
    lengths = [min(900, 1 + int(rng.expovariate(1 / mean))) for _ in range(400)]
    return [JobRow(random_tokens(rng, rng.randrange(20, 80)), length, 900) for length in lengths]


@pytest.mark.parametrize(
    ("seed", "mean"),
    [
        *((seed, 60) for seed in range(3)),
        *(pytest.param(seed, mean, marks=pytest.mark.slow) for mean in (60, 120, 200) for seed in range(10)),
    ],
)
def test_little_is_computed_twice_where_answers_may_end_at_any_token(seed: int, mean: int) -> None:
    rows = geometric_rows(seed, mean)
    job = simulate_job(rows, working_set(rows) // 4)
    assert job.recomputed_tokens < 0.02 * sum(job.tokens)


def test_little_is_computed_twice_where_every_answer_reaches_its_limit() -> None:
    """Though any might have ended before, for all that was known. Greedy admission computes a third of it twice."""
    rng = random.Random(0)
    rows = [JobRow(random_tokens(rng, 40), 300, 300) for _ in range(150)]
    forecast = simulate_job(rows, working_set(rows) // 4)
    assert forecast.recomputed_tokens < 0.02 * sum(forecast.tokens)
    greedy = simulate_job(rows, working_set(rows) // 4, admission="greedy")
    assert greedy.recomputed_tokens > 0.2 * sum(greedy.tokens)


def test_a_uniform_job_starts_in_its_order_and_at_once() -> None:
    """256 rows of about 70 tokens: the first step is as full as the budget allows, and no step is lost to waiting."""
    rng = random.Random(0)
    rows = [JobRow(random_tokens(rng, rng.randrange(60, 80)), 16) for _ in range(256)]
    packed, plain = (simulate_job(rows, AMPLE, order=order) for order in ("packed", "input"))
    assert packed.tokens[0] == plain.tokens[0] == 2048
    assert len(packed.tokens) <= len(plain.tokens)
    assert sorted(packed.started) == list(range(256))
    assert max(abs(place - row) for place, row in enumerate(packed.started)) < 64
