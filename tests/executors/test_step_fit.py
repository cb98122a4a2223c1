"""The fit of step times, on times that follow a known law."""

import numpy as np
import pytest

from batchinfer.executors.step_fit import TimedStep, fit_step_times, non_negative_least_squares


def law(tokens: float, samples: float, cache_tokens: float, pairs: float) -> float:
    """Seconds: reading the weights or computing, whichever takes longer, and the rest in proportion."""
    return max(0.02, 1e-3 * tokens) + 2e-4 * samples + 1e-6 * cache_tokens + 1e-7 * pairs


def step(tokens: float, samples: float, context: float) -> TimedStep:
    cache_tokens, pairs = samples * context, tokens * context / 2
    return TimedStep(tokens, samples, cache_tokens, pairs, law(tokens, samples, cache_tokens, pairs))


STEPS = [
    *(step(count, count, context) for count in (1, 8, 32, 128) for context in (32, 256, 1024)),
    *(step(count, samples, context) for count in (128, 512, 2048) for samples in (1, 8) for context in (64, 512)),
]


def test_finds_the_law_that_made_the_times() -> None:
    times = fit_step_times(STEPS, "here", "2026-01-31")
    assert times.error < 0.02
    assert times.sample_s == pytest.approx(2e-4, rel=0.05)
    assert times.cache_token_s == pytest.approx(1e-6, rel=0.05)
    assert times.pair_s == pytest.approx(1e-7, rel=0.05)
    for tokens, seconds in ((1, 0.02), (8, 0.02), (32, 0.032), (128, 0.128), (512, 0.512), (2048, 2.048)):
        assert np.interp(tokens, times.token_counts, times.tokens_s) == pytest.approx(seconds, rel=0.03)


def test_noise_makes_no_part_negative() -> None:
    rng = np.random.default_rng(0)
    noisy = [s._replace(seconds=s.seconds * rng.uniform(0.8, 1.2)) for s in STEPS]
    times = fit_step_times(noisy, "here", "2026-01-31")
    assert min(*times.tokens_s, times.sample_s, times.cache_token_s, times.pair_s) >= 0
    assert list(times.tokens_s) == sorted(times.tokens_s)
    assert 0.02 < times.error < 0.2


@pytest.mark.parametrize("seed", range(10))
def test_least_squares_meet_the_conditions_of_optimality(seed: int) -> None:
    """x is optimal where its gradient is zero for positive entries and does not fall for zero ones (Karush, Kuhn and
    Tucker)."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(30, 8)), rng.normal(size=30)
    found = non_negative_least_squares(matrix, target)
    gradient = matrix.T @ (matrix @ found - target)
    assert (found >= 0).all()
    assert gradient[found > 0] == pytest.approx(0, abs=1e-8)
    assert (gradient[found == 0] >= -1e-8).all()


def test_least_squares_without_a_bound_in_the_way() -> None:
    matrix = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    assert non_negative_least_squares(matrix, np.array([1.0, 3.0, 5.0])) == pytest.approx([1.0, 2.0])
