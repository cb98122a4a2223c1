"""Units, edges and sums that the plots show: pure functions of numbers. Used by the modules that draw."""

from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.distribution import Distribution

FloatArray = npt.NDArray[np.float64]
_SECOND_UNITS = ((7200.0, 3600.0, "h"), (300.0, 60.0, "min"), (1.0, 1.0, "s"), (0.0, 1e-3, "ms"))
_LEAST_SPAN = 0.2  # of the numbers' size: closer ones are shown as alike, not their noise
_WIDE_RANGE = 20.0  # times as large: more than what a linear axis shows well


def time_unit(largest_s: float) -> tuple[float, str]:
    """(seconds of the unit, its name) for an axis up to so many seconds."""
    return next((seconds, name) for least, seconds, name in _SECOND_UNITS if largest_s >= least)


def is_wide(distribution: Distribution) -> bool:
    """Whether its numbers ask for a logarithmic axis."""
    low, high = distribution.percentile(0.01), distribution.percentile(0.99)
    return low is not None and high is not None and low > 0 and high / low > _WIDE_RANGE


def histogram(distribution: Distribution, num_bins: int, is_log: bool) -> tuple[FloatArray, FloatArray]:
    """(edges [num_bins + 1] from the smallest to the largest number, counts [num_bins]). Numbers that are close
    together stand in the middle of a linear axis that is a fifth of their size long."""
    values, counts = distribution.ordered()
    low, high = distribution.min, distribution.max
    if is_log:
        low = values[values > 0][0]
        edges = np.geomspace(low, max(high, low * 1.01), num_bins + 1)
    else:
        missing = max(0.0, _LEAST_SPAN * high - (high - low), 1e-9 - high) / 2
        edges = np.linspace(max(0.0, low - missing), high + missing, num_bins + 1)
    values = values.clip(edges[0], edges[-1])  # zeros on a logarithmic axis; rounding at the ends
    return edges, np.histogram(values, edges, weights=counts)[0].astype(np.float64)


def shares_below(distribution: Distribution) -> tuple[FloatArray, FloatArray]:
    """(rising values, share of the numbers up to each): the empirical distribution function of at least one number. It
    begins with nothing at the smallest."""
    values, counts = distribution.ordered()
    shares = np.cumsum(counts) / distribution.count
    return np.concatenate([values[:1], values]), np.concatenate([[0.0], shares])


def time_edges(end_s: FloatArray, most_bins: int = 120) -> FloatArray:
    """Edges of equally long spans over a run whose intervals end at these times, no more of them than intervals."""
    return np.linspace(0.0, float(end_s[-1]), min(most_bins, len(end_s)) + 1)


def spread(end_s: FloatArray, amounts: Any, edges: FloatArray) -> FloatArray:
    """What falls into each span [len(edges) - 1] of amounts that come evenly over their intervals; the sum stays."""
    ends = np.concatenate([[0.0], end_s])
    total = np.concatenate([[0.0], np.cumsum(amounts)])
    return np.diff(np.interp(edges, ends, total))


def mean_over(end_s: FloatArray, levels: Any, edges: FloatArray) -> FloatArray:
    """The mean over time in each span of levels that hold for their own interval."""
    durations = np.diff(end_s, prepend=0.0)
    return spread(end_s, np.asarray(levels) * durations, edges) / np.diff(edges)
