"""Prequential relative error: predict, then learn; exponentially forgotten.

    ape = |yhat - y| / y, clipped to [1e-4, 10]       half-life 1000 rows

The mean is a decayed mean; median and 90th percentile come from a decayed histogram of log ape (192 bins over five
decades, 6 % wide, interpolated). Memory is constant, and adding two histograms merges them.
"""

from __future__ import annotations

import math

import numpy as np

from online.rows import Floats, Ints
from online.snapshot import ErrorSnapshot
from online.state import Finite, saved

_LOW, _HIGH, _BINS = 1e-4, 10.0, 192
_PER_LOG = _BINS / math.log(_HIGH / _LOW)


def _bins(ape: Floats) -> tuple[Floats, Ints]:
    """Clipped errors (n,) and the bin of each."""
    clipped = np.minimum(np.maximum(ape, _LOW), _HIGH)
    return clipped, np.minimum(np.log(clipped * (1.0 / _LOW)) * _PER_LOG, _BINS - 1.0).astype(np.int64)


def binned(ape: Floats) -> tuple[Floats, float, int]:
    """Histogram, sum and number of errors (n,)."""
    clipped, bins = _bins(ape)
    counts: Floats = np.bincount(bins, minlength=_BINS).astype(np.float64)
    return counts, float(clipped.sum()), len(ape)


class PrequentialError:
    """Decayed error of one prediction stream.

    Args:
        half_life_rows: rows after which an error counts half.
    """

    STATE = saved("prequential_error", histogram=Floats, sum_ape=Finite, total=Finite)

    __slots__ = ("half_life_rows", "histogram", "sum_ape", "total")

    def __init__(self, half_life_rows: float = 1000.0) -> None:
        self.half_life_rows = half_life_rows
        self.histogram = np.zeros(_BINS)
        self.sum_ape = 0.0
        self.total = 0.0

    def learn(self, ape: Floats) -> None:
        """Errors (n,) of one block; they must be finite."""
        self.add_counts(*binned(ape))

    def add_counts(self, counts: Floats, sum_ape: float, n: int) -> None:
        """Errors of one block after :func:`binned`."""
        kept = 2.0 ** (-n / self.half_life_rows)
        self.histogram *= kept
        self.histogram += counts
        self.sum_ape = self.sum_ape * kept + sum_ape
        self.total = self.total * kept + n

    def mean(self) -> float:
        """Infinite before the first prediction."""
        return self.sum_ape / self.total if self.total > 0.0 else np.inf

    def quantiles(self, *shares: float) -> list[float]:
        """Interpolated quantiles; need at least one error."""
        cumulative = self.histogram.cumsum()
        places = []
        for share in shares:  # of two or three, numpy's calls would cost more than the numbers
            wanted = float(cumulative[-1]) * share
            index = min(int(cumulative.searchsorted(wanted)), _BINS - 1)
            below = float(cumulative[index - 1]) if index else 0.0
            inside = (wanted - below) / max(float(self.histogram[index]), 1e-300)
            places.append((index + min(max(inside, 0.0), 1.0)) / _PER_LOG)
        found: list[float] = (_LOW * np.exp(places)).tolist()
        return found

    def snapshot(self) -> ErrorSnapshot | None:
        """As ratios; None before the first prediction."""
        if self.total <= 0.0:
            return None
        median_ape, p90_ape = self.quantiles(0.5, 0.9)
        return ErrorSnapshot(mape=self.mean(), median_ape=median_ape, p90_ape=p90_ape)

    def add(self, other: PrequentialError) -> None:
        """Add the errors of another record to these."""
        self.histogram += other.histogram
        self.sum_ape += other.sum_ape
        self.total += other.total
