"""Histograms, distribution functions and sums over time against NumPy and plain loops."""

import numpy as np
import pytest

from batchinfer.distribution import Distribution
from batchinfer.report.scales import histogram, is_wide, mean_over, shares_below, spread, time_edges, time_unit


def filled(numbers: np.ndarray, exact_limit: int = 10_000) -> Distribution:
    distribution = Distribution(exact_limit)
    distribution.add_many(np.asarray(numbers, np.float64))
    return distribution


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("is_log", [False, True])
def test_histogram_equals_numpy(seed, is_log):
    numbers = np.random.default_rng(seed).lognormal(3, 1.5, 700)
    edges, counts = histogram(filled(numbers), 40, is_log)
    steps = np.diff(np.log(edges) if is_log else edges)
    assert steps == pytest.approx(np.full(40, steps[0]))
    assert (edges[0], edges[-1]) == pytest.approx((numbers.min(), numbers.max()))
    assert counts.sum() == 700
    ours = np.histogram(numbers, edges)[0]
    assert counts[1:-1].tolist() == ours[1:-1].tolist()  # the outermost numbers lie on an edge


def test_histogram_of_a_million_numbers_is_near_numpy_s():
    """In buckets of 1% a number moves over an edge of a bin at most: no bin's sum up to there is wrong by more."""
    numbers = np.random.default_rng(0).gamma(3, 200, 1_000_000)
    edges, counts = histogram(filled(numbers, 1000), 40, False)
    exact = np.histogram(numbers, edges)[0]
    assert np.abs(np.cumsum(counts) - np.cumsum(exact)).max() < 0.006 * len(numbers)


@pytest.mark.parametrize("numbers", [[5.0], [0.0], [0.0, 0.0, 7.0], [3.0] * 9])
@pytest.mark.parametrize("is_log", [False, True])
def test_few_or_equal_numbers_have_a_histogram(numbers, is_log):
    if is_log and not any(numbers):
        assert not is_wide(filled(numbers))
        return
    edges, counts = histogram(filled(numbers), 10, is_log)
    assert (np.diff(edges) > 0).all()
    assert counts.sum() == len(numbers)


def test_numbers_that_are_alike_stand_in_the_middle_of_an_axis_of_a_fifth_of_their_size():
    edges, counts = histogram(filled([100.0, 100.5, 101.0]), 40, False)
    assert (edges[0], edges[-1]) == pytest.approx((100.5 - 10.1, 100.5 + 10.1))
    assert np.flatnonzero(counts).tolist() == [19, 20]  # the middle ones; a bin is 0.505 wide
    edges, _ = histogram(filled([100.0, 130.0]), 40, False)
    assert (edges[0], edges[-1]) == (100, 130)


def test_shares_below_are_the_ranks():
    values, shares = shares_below(filled([4.0, 1.0, 3.0, 2.0]))
    assert values.tolist() == [1, 1, 2, 3, 4]
    assert shares.tolist() == [0, 0.25, 0.5, 0.75, 1]


def test_the_function_of_one_number_is_a_step():
    values, shares = shares_below(filled([7.0]))
    assert (values.tolist(), shares.tolist()) == ([7, 7], [0, 1])


def test_wide_ranges_ask_for_a_logarithmic_axis():
    assert is_wide(filled(np.geomspace(1, 1000, 50)))
    assert not is_wide(filled(np.linspace(10, 100, 50)))
    assert not is_wide(filled(np.repeat([0.0, 100.0], [2, 48])))  # no logarithm of 0
    assert not is_wide(Distribution())


@pytest.mark.parametrize("seed", range(10))
def test_spread_and_mean_equal_a_fine_sampling(seed):
    rng = np.random.default_rng(seed)
    ends = np.cumsum(rng.uniform(0.2, 2.0, int(rng.integers(1, 60))))
    amounts, levels = rng.integers(0, 100, len(ends)), rng.uniform(0, 9, len(ends))
    edges = time_edges(ends, most_bins=13)
    assert len(edges) == min(13, len(ends)) + 1
    moments = (np.arange(400_000) + 0.5) / 400_000 * ends[-1]
    interval = np.searchsorted(ends, moments)
    place = np.minimum(np.searchsorted(edges, moments) - 1, len(edges) - 2)
    density = (amounts / np.diff(ends, prepend=0.0))[interval] * ends[-1] / 400_000
    sampled = np.bincount(place, density, len(edges) - 1)
    assert spread(ends, amounts, edges) == pytest.approx(sampled, rel=1e-3, abs=0.05)
    assert spread(ends, amounts, edges).sum() == pytest.approx(amounts.sum())
    means = np.bincount(place, levels[interval], len(edges) - 1) / np.bincount(place, minlength=len(edges) - 1)
    assert mean_over(ends, levels, edges) == pytest.approx(means, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(
    ("seconds", "unit"), [(0.02, "ms"), (0.999, "ms"), (1.0, "s"), (299, "s"), (301, "min"), (7199, "min"), (7201, "h")]
)
def test_units_suit_the_largest_time(seconds, unit):
    size, name = time_unit(seconds)
    assert name == unit
    assert size == {"ms": 0.001, "s": 1, "min": 60, "h": 3600}[unit]
