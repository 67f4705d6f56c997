"""How far rows of one time are alike: the misses of a band come in runs, and each run is little more than one row.

    a, b  = share of 64 consecutive rows below and above the band that holds 80 % of what came before
    Q    <- 2^(-64 / t) Q + 64 ((a - 0.1)^2 + (b - 0.1)^2) / 0.18      K <- 2^(-64 / t) K + 1
    phi   = max(1, (Q + 2 * 12) / (K + 2))                  1: each row is its own; 64: so many say what one does
    rho   = (phi - 1) / 63                                 the part of the variance that lies between windows

t is the half-life of the band's own memory, in rows. Two windows of phi = 12 stand for what is not known yet.
Reference: Kish, Survey Sampling (1965), the design effect of clusters.
"""

from __future__ import annotations

import numpy as np

from online.rows import Floats, Mask
from online.state import Finite, saved

WINDOW_ROWS = 64
_MISS = 0.1
_VARIANCE = 2.0 * _MISS * (1.0 - _MISS)
_FIRST_EFFECT, _FIRST_WINDOWS = 12.0, 2.0


class MissRuns:
    """Of one band: ``excess`` is Q, ``windows`` K; ``filling``: rows, below and above of the window that is open."""

    STATE = saved("miss_runs", filling=Floats, excess=Finite, windows=Finite)

    __slots__ = ("excess", "filling", "windows")

    def __init__(self) -> None:
        self.filling = np.zeros(3)
        self.excess = self.windows = 0.0

    def learn(self, below: Mask, above: Mask, half_life_rows: float) -> None:
        """Whether each row missed on this side, (n,) each, in order of time."""
        n = len(below)
        first = WINDOW_ROWS - int(self.filling[0])
        if n < first:
            self.filling += np.array([n, np.count_nonzero(below), np.count_nonzero(above)])
            return
        starts = np.arange(first - WINDOW_ROWS, n, WINDOW_ROWS)
        starts[0] = 0
        missed = np.add.reduceat(np.array((below, above)), starts, axis=1, dtype=np.float64)
        missed[:, 0] += self.filling[1:]
        self.filling[0] = left = (n - first) % WINDOW_ROWS
        self.filling[1:] = missed[:, -1] if left else 0.0
        ends = (n - first) // WINDOW_ROWS + 1
        share = missed[:, :ends] / WINDOW_ROWS - _MISS
        kept = 2.0 ** (-WINDOW_ROWS / half_life_rows * np.arange(ends, -1.0, -1.0))
        self.excess = float(kept[0] * self.excess + WINDOW_ROWS / _VARIANCE * (kept[1:] @ (share**2).sum(axis=0)))
        self.windows = float(kept[0] * self.windows + kept[1:].sum())

    @property
    def effect(self) -> float:
        """phi: how many rows say what one would."""
        known = self.excess + _FIRST_EFFECT * _FIRST_WINDOWS
        return max(1.0, known / (self.windows + _FIRST_WINDOWS))

    @property
    def between(self) -> float:
        """rho, 0 to 1 and a little more where whole windows miss."""
        return (self.effect - 1.0) / (WINDOW_ROWS - 1.0)

    def forget(self, keep: float) -> None:
        """Keep this share of what was seen."""
        self.excess *= keep
        self.windows *= keep

    def add(self, other: MissRuns) -> None:
        """Windows of both; the open ones are not joined."""
        self.excess += other.excess
        self.windows += other.windows
