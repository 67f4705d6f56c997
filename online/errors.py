"""How far off predictions were: prequential error, who predicts best, bands of observed / predicted, residuals.

Every row is predicted before it is learned. Errors, bands and residuals are histograms, so that memory is constant and
rows of two streams add; the first two forget exponentially, the third never does.
"""

from __future__ import annotations

import math

import numpy as np

from .blocks import STRATA, Design, stratum_name
from .constants import ERROR_MAX, ERROR_ROWS, MEMORY_ROWS, NOISE_ROWS, TINY
from .rows import Floats, Ints
from .snapshot import ErrorSnapshot, IntervalSnapshot, ResidualSnapshot
from .state import Stateful


def _places(histograms: Floats, shares: tuple[float, ...]) -> Floats:
    """Where these shares of histograms (s, bins) lie, in bins from the first edge, (s, len(shares))."""
    cumulative = histograms.cumsum(axis=1)
    wanted = cumulative[:, -1:] * np.array(shares)
    index = np.minimum((cumulative[:, None, :] < wanted[:, :, None]).sum(axis=2), histograms.shape[1] - 1)
    rows = np.arange(len(histograms))[:, None]
    inside = histograms[rows, index]
    part = (wanted - (cumulative[rows, index] - inside)) / np.maximum(inside, TINY)
    places: Floats = index + np.minimum(np.maximum(part, 0.0), 1.0)
    return places


# Derived: bins are 0.25 % wide near 0 and 12 % far out; 44 of them to each side reach log ratios of 2.4.
_SCALE, _PER_UNIT, _BINS = 0.02, 8.0, 88
# Guard: an error is at most ten times the step, and a step at most ten times its prediction.
RATIO_MAX = 10.0


def _bins(values: Floats) -> Ints:
    """The bin of each value, (n,), from 0 on and without an end."""
    return np.floor(_PER_UNIT * np.arcsinh(values / _SCALE)).astype(np.int64)


def _values(places: Floats) -> Floats:
    """What lies at these places, in bins from the one that begins at 0."""
    return _SCALE * np.sinh(places / _PER_UNIT)


# ------------------------------------------------------------------- prequential error


class PrequentialError(Stateful):
    """Relative error of one prediction, |yhat - y| / y, at most 10, forgotten with a half-life of 1000 rows.

    The mean is a decayed mean; median and 90th percentile come from a decayed histogram, interpolated.
    """

    SAVED = ("histogram", "sum_ape", "total")

    def __init__(self) -> None:
        self.histogram = np.zeros(_BINS)
        self.sum_ape = self.total = 0.0

    def learn(self, ape: Floats) -> None:
        """Errors (n,) of one block; they must be finite."""
        clipped = np.minimum(ape, RATIO_MAX)
        kept = 0.5 ** (len(ape) / ERROR_ROWS)
        self.histogram *= kept
        np.add.at(self.histogram, _bins(clipped), 1.0)
        self.sum_ape = self.sum_ape * kept + float(clipped.sum())
        self.total = self.total * kept + len(ape)

    def mean(self) -> float:
        """Infinite before the first prediction."""
        return self.sum_ape / self.total if self.total > 0.0 else np.inf

    def snapshot(self) -> ErrorSnapshot | None:
        """As ratios; None before the first prediction."""
        if self.total <= 0.0:
            return None
        median_ape, p90_ape = _values(_places(self.histogram[None, :], (0.5, 0.9))[0]).tolist()
        return ErrorSnapshot(mape=self.mean(), median_ape=median_ape, p90_ape=p90_ape)


# ------------------------------------------------------------------- who predicts best


class Contest(Stateful):
    """Discounted errors of k predictions of the same rows, (k,), each row's at most 0.5.

        E_k <- 2^(-rows / 256) E_k + sum of min(|exp(p_k - r) - 1|, 0.5)

    r: log(y / yhat) of a row; p_k: what prediction k adds to log yhat.
    """

    SAVED = ("errors",)

    def __init__(self, size: int) -> None:
        self.errors = np.zeros(size)

    def learn(self, added: Floats, log_ratio: Floats, counts: float = 1.0) -> Ints:
        """Score what k predictions add, (k, n) or (k, 1), on rows r (n,); return the best one before each row, (n,)."""
        errors = counts * np.minimum(np.abs(np.expm1(added - log_ratio)), ERROR_MAX)
        left = np.exp2(np.arange(-len(log_ratio), 1) * (counts / MEMORY_ROWS))
        grown = (np.column_stack((self.errors, errors)) * left).cumsum(axis=1)
        self.errors = grown[:, -1]
        best: Ints = grown[:, :-1].argmin(axis=0)
        return best

    def best(self) -> int:
        """Number of the one with the smallest error, the first of several."""
        return int(self.errors.argmin())


# ------------------------------------------------------------------- bands

# Chosen: on the recordings c0, c1, c3, c5, c9 and p1.
WIDER = 1.15


class Intervals(Stateful):
    """P10, P50 and P90 of observed / predicted, per stratum.

        r = log(y / yhat)       h_s <- 2^(-n_s / 1000) h_s + counts of floor(8 asinh(r / 0.02))     (32, 88)
        q_s = quantiles of h_s, 1.15 times as far from the middle

    A band is read for minutes to come, in which levels wander and to which beta and F have not been fitted: hence the
    1.15. Adding histograms merges them. ``histogram``: h_s. ``rows``: how many were learned of each stratum, (32,).
    """

    SAVED = ("histogram", "rows")

    def __init__(self) -> None:
        self.histogram, self.rows = np.zeros((STRATA, _BINS)), np.zeros(STRATA)

    def learn(self, block: Design, log_ratio: Floats) -> None:
        """Rows of a block and their r, (n,), finite."""
        bins = _bins(log_ratio) + _BINS // 2
        flat = block.stratum * _BINS + np.minimum(np.maximum(bins, 0), _BINS - 1)
        rows = np.bincount(block.stratum, minlength=STRATA)
        self.decay(rows)
        np.add.at(self.histogram.reshape(-1), flat, 1.0)
        self.rows += rows

    def decay(self, rows: Floats | Ints) -> None:
        """Forget as if so many rows of each stratum, (32,), had been learned."""
        self.histogram *= np.exp2(-rows / ERROR_ROWS)[:, None]

    def snapshot(self, *, by_stratum: bool = True) -> IntervalSnapshot | None:
        """Pooled ratios, and those of every stratum with 32 rows or more; None before the first row."""
        pool = self.histogram.sum(axis=0)
        if not pool.any():
            return None
        known = (self.histogram.sum(axis=1) >= NOISE_ROWS).nonzero()[0] if by_stratum else np.empty(0, np.int64)
        places = _places(np.concatenate((pool[None, :], self.histogram[known])), (0.1, 0.5, 0.9))
        log_ratio = _values(places - _BINS / 2)
        middle = log_ratio[:, 1:2]
        (p10, p50, p90), *own = np.exp(middle + WIDER * (log_ratio - middle)).tolist()
        strata = {stratum_name(s): (low, mid, high) for s, (low, mid, high) in zip(known.tolist(), own, strict=True)}
        return IntervalSnapshot(p10=p10, p50=p50, p90=p90, strata=strata)

    def forget(self, keep: float) -> None:
        """Keep this share of what was seen."""
        self.histogram *= keep

    def add(self, other: Intervals) -> None:
        """Rows of both."""
        self.histogram += other.histogram
        self.rows += other.rows


# ------------------------------------------------------------------- residuals since the beginning

# Format: bounds of the published counts; a guess of what readers ask for.
RATIO_BOUNDS = (0.5, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 2.0)
_LOG_BOUNDS = np.log(RATIO_BOUNDS)


class Residuals(Stateful):
    """Counts of observed / predicted of all rows, each predicted by the champion of that time; they never decay.

    Counts in ten classes of nine bounds, up to and including each, and the sum of the ratios, each at most 10. They
    only grow, so that a reader can subtract two of them and has the residuals of the time between, over any window and
    any number of replicas.
    """

    SAVED = ("rows", "ratio_sum")

    def __init__(self) -> None:
        self.rows: Ints = np.zeros(len(RATIO_BOUNDS) + 1, np.int64)
        self.ratio_sum = 0.0

    def learn(self, log_ratio: Floats) -> None:
        """Count log(y / yhat) of one block, (n,), finite."""
        self.rows += np.bincount(_LOG_BOUNDS.searchsorted(log_ratio), minlength=len(self.rows))
        self.ratio_sum += float(np.exp(np.minimum(log_ratio, math.log(RATIO_MAX))).sum())

    def add(self, other: Residuals) -> None:
        """Rows of both."""
        self.rows += other.rows
        self.ratio_sum += other.ratio_sum

    def snapshot(self) -> ResidualSnapshot | None:
        """None before the first row that was predicted."""
        if not self.rows.any():
            return None
        return ResidualSnapshot(ratio_bounds=list(RATIO_BOUNDS), rows=self.rows.tolist(), ratio_sum=self.ratio_sum)
