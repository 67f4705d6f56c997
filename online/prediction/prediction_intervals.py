"""Prediction intervals: P10, P50 and P90 of observed / predicted, per stratum.

    r   = log(y / yhat)                                 bins: k = floor(8 asinh(r / 0.02)) + 44, 88 of them
    h_s <- 2^(-n_s / t) h_s + counts                    one decayed histogram per stratum (32, 88), own sample clock
    t    = min(2000, max(64, rows / 10))                what was predicted before much was known tells little of now
    q_s = quantiles of h_s + 32 rows' worth of all      a stratum with few rows borrows from the whole

The bins are 0.25 % wide near 0 and 12 % wide far out; quantiles are interpolated and looked up anew
every 1024 rows, early on more often. Adding histograms merges them.
What is published is used for minutes, in which levels wander (51 to 92 % of one recording's rest). Its quantiles allow
for what is not known, n the rows remembered, phi and rho as in miss_runs.py:

    shares   0.1 - d, 0.5, 0.9 + d        d = min(0.08, 0.9 phi / n)        as of n / phi rows that share no noise
    q_s     <- q50 + sqrt(1 + rho) (q_s - q50)

because beta and F followed the level of the rows that are remembered, and will not follow that of those to come.
Reference: Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World (2005), for the shares.
"""

from __future__ import annotations

import math

import numpy as np

from online.blocks import STRATA, Design
from online.rows import Floats, Ints, Mask
from online.snapshot import IntervalSnapshot
from online.state import Count, saved

from .miss_runs import MissRuns

_SCALE, _PER_UNIT, _BINS = 0.02, 8.0, 88
_SHARES = np.array([0.1, 0.5, 0.9])
_EDGES = _SCALE * np.sinh((np.arange(_BINS + 1) - _BINS / 2) / _PER_UNIT)
_MISS = 0.1
_PUBLISHED_ROWS = 30
_TABLE_ROWS = 1024
_HALF_LIFE_MIN_ROWS, _HALF_LIFE_SHARE = 64.0, 0.1
_UNSURE_MAX = 0.08


def _bins(log_ratio: Floats) -> Ints:
    """Bin of each log ratio (n,)."""
    bins = np.floor(_PER_UNIT * np.arcsinh(log_ratio / _SCALE)).astype(np.int64) + _BINS // 2
    return np.minimum(np.maximum(bins, 0), _BINS - 1)


class Intervals:
    """Of one prediction.

    Args:
        half_life_rows: of each stratum's histogram, on its own clock.
        borrowed_rows: weight of the pooled histogram in each stratum.
    """

    STATE = saved("intervals", histogram=Floats, table=Floats, stale_rows=int, rows=Count, runs=MissRuns)

    __slots__ = (
        "borrowed_rows", "half_life_rows", "histogram", "rows", "runs", "stale_rows", "table",
    )  # fmt: skip

    def __init__(self, half_life_rows: float = 2000.0, borrowed_rows: float = 32.0) -> None:
        self.half_life_rows = half_life_rows
        self.borrowed_rows = borrowed_rows
        self.histogram = np.zeros((STRATA, _BINS))
        self.table = np.zeros((STRATA, 3))
        self.stale_rows = -1
        self.rows = 0
        self.runs = MissRuns()

    def learn(self, block: Design, log_ratio: Floats) -> None:
        """Judge the interval by the rows, then learn them; log_ratio (n,) finite."""
        n, stratum = len(log_ratio), block.stratum
        half_life_rows = min(self.half_life_rows, max(_HALF_LIFE_MIN_ROWS, _HALF_LIFE_SHARE * self.rows))
        if self.stale_rows >= 0:
            own = self.table.take(stratum, axis=0)
            self.runs.learn(log_ratio < own[:, 0], log_ratio > own[:, 2], half_life_rows)
        flat = stratum * _BINS + _bins(log_ratio)
        groups = block.grouped()
        self.histogram[groups.ids] *= np.exp2(-groups.sizes / half_life_rows)[:, None]
        self.histogram += np.bincount(flat, minlength=STRATA * _BINS).reshape(STRATA, _BINS)
        self.rows += n
        self.stale_rows += n
        if self.stale_rows < n or self.stale_rows >= min(_TABLE_ROWS, self.rows // 8):
            self.table = self._quantiles()
            self.stale_rows = 0

    def _quantiles(self) -> Floats:
        """P10, P50 and P90 of log(y / yhat) of every stratum, (32, 3); needs a row."""
        pool = self.histogram.sum(axis=0)
        used: Mask = np.asarray(self.histogram.any(axis=1))
        found = self._interpolate(np.concatenate((pool[None, :], self._with_borrowed(used, pool))), _SHARES)
        table = np.empty((STRATA, 3))
        table[:] = found[0]
        table[used] = found[1:]
        return table

    def _with_borrowed(self, strata: Ints | Mask, pool: Floats) -> Floats:
        """Histograms of these strata, (s, 88), with what they borrow from the whole."""
        mixed: Floats = self.histogram[strata] + pool * (self.borrowed_rows / pool.sum())
        return mixed

    @staticmethod
    def _interpolate(mixed: Floats, shares: Floats) -> Floats:
        cumulative = np.cumsum(mixed, axis=1)
        wanted = cumulative[:, -1:] * shares
        index = np.minimum((cumulative[:, None, :] < wanted[:, :, None]).sum(axis=2), _BINS - 1)
        rows = np.arange(len(mixed))[:, None]
        inside = mixed[rows, index]
        part = (wanted - (cumulative[rows, index] - inside)) / np.maximum(inside, 1e-300)
        edge = _EDGES[index]
        result: Floats = edge + np.minimum(np.maximum(part, 0.0), 1.0) * (_EDGES[index + 1] - edge)
        return result

    def snapshot(self, *, by_stratum: bool = True) -> IntervalSnapshot | None:
        """Pooled ratios, and those of every stratum with 30 rows or more."""
        if self.stale_rows < 0:
            return None
        pool, told = self.histogram.sum(axis=0), np.empty(0, np.int64)
        mixed = pool[None, :]
        if by_stratum:
            told = (self.histogram.sum(axis=1) >= _PUBLISHED_ROWS).nonzero()[0]
            mixed = np.concatenate((mixed, self._with_borrowed(told, pool)))
        (p10, p50, p90), *own = self._spread(self._interpolate(mixed, self._shares())).tolist()
        strata = {stratum_name(s): (low, mid, high) for s, (low, mid, high) in zip(told.tolist(), own, strict=True)}
        return IntervalSnapshot(p10=p10, p50=p50, p90=p90, strata=strata)

    def _shares(self) -> Floats:
        """The quantiles that hold 80 % of rows to come, as far as so few that share their noise can tell."""
        remembered = min(float(self.rows), 2.0 * float(self.histogram.sum()))
        unsure = min(_UNSURE_MAX, (1.0 - _MISS) * self.runs.effect / max(remembered, 1.0))
        shares: Floats = _SHARES + np.array([-unsure, 0.0, unsure])
        return shares

    def _spread(self, table: Floats) -> Floats:
        """Ratios of log quantiles (n, 3), further apart by what levels differ."""
        middle = table[:, 1:2]
        ratio: Floats = np.exp(middle + math.sqrt(1.0 + self.runs.between) * (table - middle))
        return ratio

    def forget(self, keep: float) -> None:
        """Keep this share of what was seen, and learn as fast as after so few rows."""
        self.histogram *= keep
        self.runs.forget(keep)
        self.rows = int(self.rows * keep)

    def add(self, other: Intervals) -> None:
        """Rows of both."""
        self.histogram += other.histogram
        self.rows += other.rows
        self.runs.add(other.runs)
        if self.histogram.any():
            self.table, self.stale_rows = self._quantiles(), 0


def stratum_name(stratum: int) -> str:
    """``decode:8-15`` for has_prefill = 0 and 8 to 15 requests, ``prefill:1`` for one request with prefill."""
    kind, octave = divmod(stratum, STRATA // 2)
    low, high = 2**octave, 2 ** (octave + 1) - 1
    return f"{'prefill' if kind else 'decode'}:{low if low == high else f'{low}-{high}'}"
