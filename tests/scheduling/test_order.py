"""The order of rows, against plain recounts of what it is to achieve."""

import random
import subprocess
import sys
from collections import defaultdict

import numpy as np
import pytest

from batchinfer.scheduling.order import packed_order
from batchinfer.scheduling.prefixes import common_tokens, sort_by_beginning

SIZE = 4


def random_prompts(rng: random.Random, count: int) -> list[np.ndarray]:
    """Grown from one another, so that beginnings are shared on many levels; some are equal."""
    prompts = [[rng.randrange(3)]]
    while len(prompts) < count:
        stem = rng.choice(prompts)[: rng.randrange(40)]
        prompts.append(stem + [rng.randrange(50) for _ in range(rng.choice([0, 1, 5, 17]))] or [1])
    rng.shuffle(prompts)
    return [np.array(prompt, np.int32) for prompt in prompts]


def blocks_of(prompt: np.ndarray) -> list[tuple[int, ...]]:
    """The beginnings that end with a full block."""
    return [tuple(prompt[:stop].tolist()) for stop in range(SIZE, len(prompt) + 1, SIZE)]


def order_of(prompts: list[np.ndarray], outputs: list[float], **options: object) -> list[int]:
    return packed_order(prompts, np.array(outputs, np.float64), SIZE, **{"max_num_seqs": 4} | options).tolist()


@pytest.mark.parametrize("seed", range(10))
def test_neighbours_by_beginning_share_what_a_plain_comparison_finds(seed: int) -> None:
    prompts = random_prompts(random.Random(seed), 60)
    order, shared = sort_by_beginning(prompts, SIZE)
    assert sorted(order.tolist()) == list(range(60))
    assert shared[0] == 0
    for before, here, found in zip(order[:-1], order[1:], shared[1:], strict=True):
        one, other = prompts[before].tolist(), prompts[here].tolist()
        common = next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        assert common_tokens(prompts[before], prompts[here]) == common
        assert found == common // SIZE


@pytest.mark.parametrize("seed", range(10))
def test_rows_under_each_beginning_stand_together(seed: int) -> None:
    """So a cache of one path computes each shared block once: as few tokens as there are in the whole tree."""
    rng = random.Random(seed)
    prompts = random_prompts(rng, 80)
    outputs = [rng.choice([20.0, 30.0]) for _ in prompts]  # none twice the mean
    order = order_of(prompts, outputs)
    assert sorted(order) == list(range(80))
    under = defaultdict(list)
    for place, row in enumerate(order):
        for beginning in blocks_of(prompts[row]):
            under[beginning].append(place)
    for places in under.values():
        assert places == list(range(places[0], places[0] + len(places)))


@pytest.mark.parametrize("seed", range(10))
def test_long_answers_come_first_on_each_level(seed: int) -> None:
    """Few rows without a common beginning: nothing but the answers' lengths counts, and equals keep their order."""
    rng = random.Random(seed)
    prompts = [np.array([row, *[5] * rng.randrange(30)], np.int32) for row in range(4)]
    outputs = [rng.choice([10.0, 15.0, 19.0]) for _ in prompts]
    assert order_of(prompts, outputs) == sorted(range(4), key=lambda row: (-outputs[row], row))
    group = [np.array([7, 7, 7, 7, row], np.int32) for row in range(4)]
    outputs[0] = 19.0
    within = [4 + row for row in sorted(range(4), key=lambda row: (-outputs[row], row))]
    assert order_of([*prompts, *group], [10.0] * 4 + outputs)[:4] == within


def test_a_uniform_job_keeps_its_order() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 50, 20).astype(np.int32) for _ in range(100)]
    assert order_of(prompts, [64.0] * 100) == list(range(100))
    beginning = rng.integers(0, 50, 8).astype(np.int32)
    assert order_of([np.concatenate([beginning, p]) for p in prompts], [64.0] * 100) == list(range(100))


@pytest.mark.parametrize("seed", range(10))
def test_work_of_both_kinds_is_mixed(seed: int) -> None:
    """Long prompts with short answers and short prompts with long answers: in each fifth of the first four, answers
    weigh about what they weigh on the whole; by falling length alone, the first fifths would hold answers only."""
    rng = random.Random(seed)
    reads = [rng.random() < 0.5 for _ in range(400)]
    prompts = [np.array([row, *[1] * (rng.randrange(300, 400) if r else 20)], np.int32) for row, r in enumerate(reads)]
    outputs = [20.0 if r else rng.uniform(250, 350) for r in reads]
    order = order_of(prompts, outputs, max_num_seqs=64)
    answers, work = np.array(outputs)[order], np.array([len(p) for p in prompts])[order] + np.array(outputs)[order]
    done = np.cumsum(work) / work.sum()
    shares = [
        answers[part].sum() / work[part].sum()
        for part in np.split(np.arange(400), np.searchsorted(done, [0.2, 0.4, 0.6, 0.8]))
    ]
    whole = answers.sum() / work.sum()
    assert all(0.75 * whole < share < 1.4 * whole for share in shares[:4])
    assert max(answers[-20:]) == 20.0


def test_what_would_outlast_the_job_starts_at_once() -> None:
    """Two groups of equal beginnings; the second holds an answer as long as half the job."""
    prompts = [np.array([row // 50] * 8 + [row], np.int32) for row in range(100)]
    outputs = [60.0] * 50 + [50.0] * 49 + [55.0]
    assert order_of(prompts, outputs) == [*range(50), 99, *range(50, 99)]
    outputs[0], outputs[99] = 900.0, 700.0
    assert order_of(prompts, outputs) == [*range(50), 99, *range(50, 99)]
    # All work takes (1100 + 49 * 60 + 1000 + 49 * 50) / 4 = 1872 steps; row 99 would start after 1010 of them.
    outputs[0], outputs[99] = 1100.0, 1000.0
    assert order_of(prompts, outputs) == [99, *range(99)]


@pytest.mark.parametrize("seed", range(10))
def test_rows_that_share_most_with_what_is_cached_come_first(seed: int) -> None:
    rng = random.Random(seed)
    prompts = random_prompts(rng, 60)
    outputs = [rng.choice([20.0, 30.0]) for _ in prompts]
    after = rng.choice(prompts)
    order = order_of(prompts, outputs, after=after)
    assert sorted(order) == list(range(60))
    shares = [len(set(blocks_of(after)) & set(blocks_of(prompts[row]))) for row in order]
    assert shares == sorted(shares, reverse=True)


def test_none_and_one() -> None:
    assert order_of([], []) == []
    assert order_of([np.array([3], np.int32)], [9.0]) == [0]


A_MILLION = """
import time
import numpy as np
from batchinfer.process import peak_memory_bytes
from batchinfer.scheduling.order import packed_order

rng = np.random.default_rng(0)
heads = [rng.integers(0, 49152, 128, dtype=np.int32) for _ in range(1000)]
tails = (rng.integers(0, 49152, size, dtype=np.int32) for size in rng.integers(10, 80, 1_000_000))
prompts = [np.concatenate([heads[i % 1000], tail]) for i, tail in enumerate(tails)]
lengths = rng.choice([50.0, 100.0, 200.0], len(prompts))
start = time.process_time()
order = packed_order(prompts, lengths, 16, 256)
seconds = time.process_time() - start
assert np.array_equal(np.sort(order), np.arange(len(prompts)))
print(seconds, peak_memory_bytes())
"""


@pytest.mark.slow
def test_a_million_prompts_take_less_than_a_minute_and_two_gigabytes() -> None:
    """The prompts themselves, which take 0.8 of them, included."""
    done = subprocess.run([sys.executable, "-c", A_MILLION], capture_output=True, text=True, check=True)
    seconds, peak_bytes = map(float, done.stdout.split())
    assert seconds < 60
    assert peak_bytes < 2e9
