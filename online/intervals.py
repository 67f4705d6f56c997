"""Prediction intervals: P10, P50 and P90 of observed / predicted, per stratum.

    r   = log(y / yhat)                                 bins: k = floor(8 asinh(r / 0.02)) + 44, 88 of them
    h_s <- 2^(-n_s / 2000) h_s + counts                 one decayed histogram per stratum (32, 88), own sample clock
    q_s = quantiles of h_s + 32 rows' worth of all      a stratum with few rows borrows from the whole

The bins are 0.25 % wide near 0 and 12 % wide far out; quantiles are interpolated. Adding histograms merges them.
Histograms forget slowly, so two offsets correct them at once (adaptive conformal inference): after each block

    low  <- low  - rate s (misses below - 0.1 n)        high <- high + rate s (misses above - 0.1 n)

with s half the width of the pooled interval. An alarm widens both by s.
Reference: Gibbs and Candes, Adaptive conformal inference under distribution shift (NeurIPS 2021).
"""

from __future__ import annotations

import numpy as np

from online.blocks import STRATA, Design
from online.rows import Floats, Ints
from online.snapshot import IntervalSnapshot

_SCALE, _PER_UNIT, _BINS = 0.02, 8.0, 88
_SHARES = np.array([0.1, 0.5, 0.9])
_EDGES = _SCALE * np.sinh((np.arange(_BINS + 1) - _BINS / 2) / _PER_UNIT)
_MISS = 0.1
_WIDTH_MIN, _OFFSET_MAX = 0.002, 1.0
_PUBLISHED_ROWS = 30


class Intervals:
    """Of one model's live prediction.

    Args:
        half_life_rows: of each stratum's histogram, on its own clock.
        rate: step of the conformal offsets per row.
        borrowed_rows: weight of the pooled histogram in each stratum.
    """

    __slots__ = ("borrowed_rows", "half_life_rows", "histogram", "offset", "rate")

    def __init__(self, half_life_rows: float = 2000.0, rate: float = 0.02, borrowed_rows: float = 32.0) -> None:
        self.half_life_rows = half_life_rows
        self.rate = rate
        self.borrowed_rows = borrowed_rows
        self.histogram = np.zeros((STRATA, _BINS))
        self.offset = np.zeros(2)

    def learn(self, block: Design, log_ratio: Floats) -> None:
        """Judge the interval by the rows, then learn them; log_ratio (n,) finite."""
        n = len(log_ratio)
        groups = block.grouped()
        pool = self.histogram.sum(axis=0)
        if pool.sum() > 0.0:
            bounds = self._quantiles(groups.ids, pool)
            position = groups.of_row()
            below = np.count_nonzero(log_ratio < bounds[position, 0] + self.offset[0])
            above = np.count_nonzero(log_ratio > bounds[position, 2] + self.offset[1])
            half = max(_WIDTH_MIN, 0.5 * float((bounds[:, 2] - bounds[:, 0]).mean()))
            self.offset[0] -= self.rate * half * (below - _MISS * n)
            self.offset[1] += self.rate * half * (above - _MISS * n)
            np.clip(self.offset, -_OFFSET_MAX, _OFFSET_MAX, out=self.offset)
        bins = np.floor(_PER_UNIT * np.arcsinh(log_ratio / _SCALE)) + _BINS // 2
        flat = block.stratum * _BINS + np.clip(bins, 0, _BINS - 1).astype(np.int64)
        kept = np.exp2(-groups.sizes / self.half_life_rows)
        self.histogram[groups.ids] *= kept[:, None]
        self.histogram += np.bincount(flat, minlength=STRATA * _BINS).reshape(STRATA, _BINS)

    def _quantiles(self, ids: Ints, pool: Floats) -> Floats:
        """P10, P50 and P90 of log(y / yhat) per stratum, (g, 3)."""
        mixed = self.histogram[ids] + pool * (self.borrowed_rows / pool.sum())
        cumulative = np.cumsum(mixed, axis=1)
        wanted = cumulative[:, -1:] * _SHARES
        index = np.minimum((cumulative[:, None, :] < wanted[:, :, None]).sum(axis=2), _BINS - 1)
        rows = np.arange(len(ids))[:, None]
        inside = mixed[rows, index]
        part = (wanted - (cumulative[rows, index] - inside)) / np.maximum(inside, 1e-300)
        result: Floats = _EDGES[index] + np.clip(part, 0.0, 1.0) * (_EDGES[index + 1] - _EDGES[index])
        return result

    def ratios(self, strata: Ints) -> Floats:
        """P10, P50 and P90 of y / yhat for rows of these strata, (n, 3); ones before any row."""
        pool = self.histogram.sum(axis=0)
        if pool.sum() <= 0.0:
            return np.ones((len(strata), 3))
        ids, index = np.unique(strata, return_inverse=True)
        quantiles = self._quantiles(ids, pool)
        quantiles[:, 0] = np.minimum(quantiles[:, 0] + self.offset[0], quantiles[:, 1])
        quantiles[:, 2] = np.maximum(quantiles[:, 2] + self.offset[1], quantiles[:, 1])
        ratio: Floats = np.exp(quantiles)[index]
        return ratio

    def widen(self) -> None:
        """After a change of speed nobody knows the spread: both sides by half a width."""
        pool = self.histogram.sum(axis=0)
        if pool.sum() > 0.0:
            quantiles = self._quantiles(np.zeros(1, np.int64), pool)
            half = max(_WIDTH_MIN, 0.5 * float(quantiles[0, 2] - quantiles[0, 0]))
            self.offset += np.array([-half, half])

    def snapshot(self, by_stratum: bool = True) -> IntervalSnapshot | None:
        """Pooled ratios, and those of every stratum with 30 rows or more."""
        pool = self.histogram.sum(axis=0)
        if pool.sum() <= 0.0:
            return None
        rows = self.histogram.sum(axis=1)
        seen = np.flatnonzero(rows >= _PUBLISHED_ROWS)
        strata = {}
        if by_stratum and len(seen):
            for s, (low, mid, high) in zip(seen, self.ratios(seen).tolist(), strict=True):
                strata[stratum_name(int(s))] = (low, mid, high)
        overall = Intervals(self.half_life_rows, self.rate, self.borrowed_rows)
        overall.histogram[0], overall.offset = pool, self.offset
        p10, p50, p90 = overall.ratios(np.zeros(1, np.int64))[0].tolist()
        return IntervalSnapshot(p10=p10, p50=p50, p90=p90, strata=strata)


def stratum_name(stratum: int) -> str:
    """``decode:8-15`` for has_prefill = 0 and 8 to 15 requests, ``prefill:1`` for one request with prefill."""
    kind, octave = divmod(stratum, STRATA // 2)
    low, high = 2**octave, 2 ** (octave + 1) - 1
    return f"{'prefill' if kind else 'decode'}:{low if low == high else f'{low}-{high}'}"
