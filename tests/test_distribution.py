"""Percentiles against numpy's, exact and bucketed."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.distribution import Distribution

SHARES = (0.0, 0.01, 0.5, 0.9, 0.99, 1.0)
values = st.floats(min_value=1e-5, max_value=1e9)


def fill(numbers, exact_limit: int) -> Distribution:
    distribution = Distribution(exact_limit)
    for number in numbers:
        distribution.add(float(number))
    return distribution


@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(st.just(0.0), values), min_size=1, max_size=80))
def test_exact_while_few(numbers):
    distribution = fill(numbers, exact_limit=100)
    for share in SHARES:
        assert distribution.percentile(share) == pytest.approx(np.quantile(numbers, share), rel=1e-12)


@settings(deadline=None, max_examples=60)
@given(st.lists(values, min_size=11, max_size=120))
def test_within_half_a_percent_once_bucketed(numbers):
    distribution = fill(numbers, exact_limit=10)
    for share in SHARES:
        assert distribution.percentile(share) == pytest.approx(np.quantile(numbers, share), rel=0.0051)


@pytest.mark.parametrize("sigma", [0.1, 1.0, 3.0])
def test_many_latencies(sigma):
    numbers = np.random.default_rng(7).lognormal(3.0, sigma, 20_000)
    summary = fill(numbers, exact_limit=4096).summary()
    assert summary["p50"] == pytest.approx(np.quantile(numbers, 0.5), rel=0.0051)
    assert summary["p90"] == pytest.approx(np.quantile(numbers, 0.9), rel=0.0051)
    assert summary["p99"] == pytest.approx(np.quantile(numbers, 0.99), rel=0.0051)
    assert summary["mean"] == pytest.approx(numbers.mean())
    assert summary["max"] == numbers.max()


@pytest.mark.parametrize("exact_limit", [50, 1000])
def test_an_array_counts_as_its_numbers(exact_limit):
    numbers = np.append(np.random.default_rng(5).lognormal(3.0, 2.0, 300), [0.0, 1e-9])
    one_by_one, at_once = fill(numbers, exact_limit), Distribution(exact_limit)
    for chunk in np.split(numbers, [0, 7, 40, 90]):
        at_once.add_many(chunk)
    assert at_once.summary() == pytest.approx(one_by_one.summary())
    assert (at_once.count, at_once.min, at_once.max) == (302, 0.0, numbers.max())
    for mine, others in zip(at_once.ordered(), one_by_one.ordered(), strict=True):
        assert mine.tolist() == pytest.approx(others.tolist())


@pytest.mark.parametrize(("exact_limit", "tolerance"), [(5000, 0.0), (100, 0.0051)])
def test_ordered_numbers_make_histograms(exact_limit, tolerance):
    """Once bucketed, numbers move by half a bucket at most, so that a count lies between those of shifted edges."""
    numbers = np.random.default_rng(9).lognormal(2.0, 1.0, 3000)
    values, counts = fill(numbers, exact_limit).ordered()
    assert (np.diff(values) >= 0).all()
    edges = np.geomspace(0.1, 200, 25)
    below = np.cumsum(np.histogram(values, edges, weights=counts)[0])
    lowest = np.searchsorted(np.sort(numbers), edges[1:] * (1 - tolerance)) - np.sum(numbers < edges[0])
    highest = np.searchsorted(np.sort(numbers), edges[1:] * (1 + tolerance), side="right") - np.sum(numbers < edges[0])
    assert ((lowest - 1 <= below) & (below <= highest + 1)).all()
    assert counts.sum() == 3000


def test_nothing_makes_an_empty_histogram():
    values, counts = Distribution().ordered()
    assert (len(values), len(counts)) == (0, 0)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_faulty_array(value):
    with pytest.raises(ValueError, match="all be finite and 0 or more"):
        Distribution().add_many(np.array([1.0, value]))


def test_memory_is_bounded():
    """20,000 distinct numbers over five decades take no more buckets than five decades have steps of 1%."""
    numbers = 10 ** np.random.default_rng(1).uniform(-2, 3, 20_000)
    distribution = fill(numbers, exact_limit=100)
    assert len(distribution._values) == 0
    assert len(distribution._buckets) <= math.log(10**5) / math.log(1.01) + 2


def test_zeros_and_equal_numbers():
    assert fill([0.0] * 50, exact_limit=10).summary() == {"mean": 0, "p50": 0, "p90": 0, "p99": 0, "max": 0}
    equal = fill([7.25] * 50, exact_limit=10).summary()
    assert equal == {"mean": 7.25, "p50": 7.25, "p90": 7.25, "p99": 7.25, "max": 7.25}


def test_nothing():
    assert Distribution().percentile(0.5) is None
    assert Distribution().summary() == {"mean": None, "p50": None, "p90": None, "p99": None, "max": None}


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_faulty_value(value):
    with pytest.raises(ValueError, match="finite and 0 or more"):
        Distribution().add(value)
