"""Percentiles of a stream of numbers in bounded memory. Plain: used by summary.py, the engine's statistics and
report/."""

import math
from array import array
from collections import Counter

import numpy as np
import numpy.typing as npt

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Distribution:
    """Percentiles of many non-negative numbers in bounded memory.

    Exact up to `exact_limit` numbers; from then on within 0.5% of numpy's linearly interpolated percentile, by counts
    in buckets that grow by 1% (values below 1e-6 count as 0). Mean, minimum and maximum are always exact.
    """

    _LOG_GROWTH = math.log(1.01)
    _SMALLEST = 1e-6

    def __init__(self, exact_limit: int = 4096) -> None:
        self.count = 0
        self.total = 0.0
        self.min = math.inf
        self.max = -math.inf
        self._exact_limit = exact_limit
        self._values = array("d")
        self._buckets: Counter[int] | None = None

    def add(self, value: float) -> None:
        """Raises ValueError for a negative or non-finite value."""
        if not 0 <= value < math.inf:
            raise ValueError(f"value = {value!r}: must be finite and 0 or more")
        self.count += 1
        self.total += value
        self.min = min(self.min, value)
        self.max = max(self.max, value)
        if self._buckets is not None:
            self._buckets[self._bucket(value)] += 1
            return
        self._values.append(value)
        self._stay_small()

    def add_many(self, values: npt.NDArray[np.float64]) -> None:
        """The same for an array. Raises ValueError where one of the values is negative or not finite."""
        if not len(values):
            return
        if not (np.isfinite(values).all() and values.min() >= 0):
            raise ValueError("values: must all be finite and 0 or more")
        self.count += len(values)
        self.total += float(values.sum())
        self.min, self.max = min(self.min, float(values.min())), max(self.max, float(values.max()))
        if self._buckets is None:
            self._values.frombytes(values.astype(np.float64).tobytes())
            self._stay_small()
        else:
            self._buckets.update(self._bucket_counts(values))

    def percentile(self, share: float) -> float | None:
        """The value below which `share` (0 to 1) of the numbers lie; None where there are none."""
        if self.count == 0:
            return None
        place = share * (self.count - 1)
        below = math.floor(place)
        low, high = self._order_statistics(below, min(below + 1, self.count - 1))
        return min(max(low + (high - low) * (place - below), self.min), self.max)

    def summary(self) -> dict[str, float | None]:
        """{"mean", "p50", "p90", "p99", "max"}; None where there are no numbers."""
        if self.count == 0:
            return dict.fromkeys(("mean", *_QUANTILES, "max"))
        quantiles = {name: self.percentile(share) for name, share in _QUANTILES.items()}
        return {"mean": self.total / self.count, **quantiles, "max": self.max}

    def ordered(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """(rising values, how many numbers each stands for): the numbers themselves, or the middles of their buckets
        within the smallest and the largest number."""
        if self._buckets is None:
            return np.sort(np.array(self._values)), np.ones(len(self._values), np.int64)
        buckets = sorted(self._buckets)
        middles = np.array([self._middle(bucket) for bucket in buckets])
        return middles.clip(self.min, self.max), np.array([self._buckets[bucket] for bucket in buckets])

    def _stay_small(self) -> None:
        if len(self._values) > self._exact_limit:
            self._buckets = Counter(self._bucket_counts(np.array(self._values)))
            self._values = array("d")

    def _bucket_counts(self, values: npt.NDArray[np.float64]) -> dict[int, int]:
        places = np.zeros(len(values), np.int64)
        is_small = values < self._SMALLEST
        places[~is_small] = 1 + np.floor(np.log(values[~is_small] / self._SMALLEST) / self._LOG_GROWTH)
        buckets, counts = np.unique(places, return_counts=True)
        return dict(zip(buckets.tolist(), counts.tolist(), strict=True))

    def _order_statistics(self, first: int, second: int) -> tuple[float, float]:
        """The values at two adjacent (or equal) places of the sorted numbers."""
        if self._buckets is None:
            ordered = sorted(self._values)
            return ordered[first], ordered[second]
        found: list[float] = []
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            while len(found) < 2 and (first, second)[len(found)] < seen:
                found.append(self._middle(bucket))
        return found[0], found[1]

    def _bucket(self, value: float) -> int:
        """Bucket b > 0 holds [growth^(b-1), growth^b) times the smallest value; bucket 0 what counts as 0."""
        if value < self._SMALLEST:
            return 0
        return 1 + math.floor(math.log(value / self._SMALLEST) / self._LOG_GROWTH)

    def _middle(self, bucket: int) -> float:
        return 0.0 if bucket == 0 else self._SMALLEST * math.exp((bucket - 0.5) * self._LOG_GROWTH)
