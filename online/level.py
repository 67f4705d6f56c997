"""Level: by how much the steps of the last rows took longer than x beta F, apart for steps with and without prefill.

    r_i = log(y_i / (x_i beta F))                  v_i = clip(r_i, -0.25, 0.25): one stall moves no level
    m_h   exponentially weighted mean of v         half-lives h of 8, 20 and 60 rows: River's ``stats.EWMean``
    E_h <- 2^(-1/128) E_h + min(|exp(m_h - r_i) - 1|, 0.5)         E_0: the same of m_0 = 0, no level
    c_i = m_h of the smallest E_h                  both as they were before row i, which is then learned
    D_h   as E_h, by means one to two seconds old   the level that readers get is m_h of the smallest D_h

Coefficients and shape factors follow a machine over hours. A level follows what passes within seconds: a neighbour, a
clock, a cache. The choice by error gives a calm machine none. What is best for the next row is not best for a reader,
who has it a second or more later: on the recordings the level of the next row takes 14 % off the mean error, the same
one a second later adds 2 %, the one chosen by D takes 1 % off; after 5 s any is worse than none, unless a change lasts.

Guarantee: c is finite and |c| <= 0.25 for every finite r. A confirmed change of speed moves beta and ends the level.
Merging: a level is of one machine's last seconds, so a merged one starts over; rows add.

Reference: Finch, Incremental calculation of weighted mean and variance (2009); Herbster and Warmuth, Tracking the best
expert (Machine Learning 1998), for the choice.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .blocks import STRATA, Design
from .constants import ERROR_MAX
from .rows import Floats, Ints
from .snapshot import LevelSnapshot
from .state import StateError, Stateful

# Guess: half or twice as long move errors by 0.1 points.
HALF_LIVES_ROWS = (8, 20, 60)
# Chosen: on the recordings c0, c1, c3, c5, c9 and p1.
LEVEL_MAX, MEMORY_ROWS = 0.25, 128.0
# Derived: a reader has what it reads a second or more later; after so long the means that it has are renewed.
LATE_NS = 1_000_000_000


def _errors(means: Floats, log_ratio: Floats) -> Floats:
    """Relative errors of rows (n,) by means (4, n) or (4, 1), bounded, (4, n)."""
    errors: Floats = np.minimum(np.abs(np.expm1(means - log_ratio)), ERROR_MAX)
    return errors


class PhaseLevel(Stateful):
    """The level of the steps with prefill, or of those without.

    Attributes:
        rows: how many were learned.
        last_ns: end of the newest of them, event time; 0 before the first.
        errors, late_errors: E_0 and E_h by half-life, and D, (4,) each.
        late, late_ns: m_0 and m_h of two moments a second apart, (2, 4), for D the older; the newer moment.
    """

    SAVED = ("rows", "last_ns", "errors", "late_errors", "late", "late_ns", "means")

    def __init__(self) -> None:
        self.rows = self.last_ns = 0
        self.end()

    def end(self) -> None:
        """Forget the level; rows stay counted."""
        size = 1 + len(HALF_LIVES_ROWS)
        self._means: list[Any] = []
        self.errors, self.late_errors, self.late = np.zeros(size), np.zeros(size), np.zeros((2, size))
        self.late_ns = 0

    @property
    def means(self) -> list[float]:
        """m_h by half-life; none before the first row."""
        return [mean.get() for mean in self._means]

    @means.setter
    def means(self, values: list[float]) -> None:
        if values:
            if len(values) != len(HALF_LIVES_ROWS) or max(map(abs, values)) > LEVEL_MAX:
                raise StateError("means of another number, or out of bounds")
            self._open()
            for mean, value in zip(self._means, values, strict=True):
                mean.update(value)  # River takes the first value as it is

    def _open(self) -> None:
        from river import stats  # noqa: PLC0415 -- only who learns pays for its import

        self._means = [stats.EWMean(1.0 - 0.5 ** (1.0 / rows)) for rows in HALF_LIVES_ROWS]

    def learn(self, log_ratio: Floats, end_ns: Ints) -> Floats:
        """Rows r (n,) and their ends, in order of time; c of each by the rows before it, (n,)."""
        if not self._means:
            self._open()
        if end_ns[0] >= self.late_ns + LATE_NS:
            means = self.means or [0.0] * len(HALF_LIVES_ROWS)
            self.late, self.late_ns = np.array((self.late[1], (0.0, *means))), int(end_ns[0])
        self.rows += len(log_ratio)
        self.last_ns = max(self.last_ns, int(end_ns.max()))
        n, values = len(log_ratio), np.minimum(np.maximum(log_ratio, -LEVEL_MAX), LEVEL_MAX).tolist()
        before = np.zeros((1 + len(self._means), n))
        for known, mean in zip(before[1:], self._means, strict=True):
            for i, value in enumerate(values):
                known[i] = mean.get()
                mean.update(value)
        weight, kept = np.exp2(np.arange(1 - n, 1) / MEMORY_ROWS), 0.5 ** (n / MEMORY_ROWS)
        grown = np.column_stack((self.errors * kept, _errors(before, log_ratio) * weight)).cumsum(axis=1)
        self.errors = grown[:, -1]
        self.late_errors = self.late_errors * kept + _errors(self.late[0, :, None], log_ratio) @ weight
        chosen: Floats = before[grown[:, :-1].argmin(axis=0), np.arange(n)]
        return chosen

    def snapshot(self) -> LevelSnapshot | None:
        """The level for a reader; None before the first row."""
        if not self.rows:
            return None
        chosen, means = int(self.late_errors.argmin()), self.means
        on = bool(chosen and means)
        return LevelSnapshot(
            factor=math.exp(means[chosen - 1]) if on else 1.0,
            half_life_rows=HALF_LIVES_ROWS[chosen - 1] if on else None,
            rows=self.rows,
            last_row_unix_nano=self.last_ns,
        )


class Level(Stateful):
    """Both of them, of one target."""

    SAVED = ("decode", "prefill")

    def __init__(self) -> None:
        self.decode, self.prefill = PhaseLevel(), PhaseLevel()

    def learn(self, block: Design, log_ratio: Floats) -> Floats:
        """Rows of a block, r (n,); c of each, (n,)."""
        level, with_prefill = np.empty(len(log_ratio)), block.stratum >= STRATA // 2
        for phase, rows in ((self.decode, (~with_prefill).nonzero()[0]), (self.prefill, with_prefill.nonzero()[0])):
            if len(rows):
                level[rows] = phase.learn(log_ratio[rows], block.end_ns[rows])
        return level

    def end(self) -> None:
        """A change of speed was confirmed, or states were merged."""
        self.decode.end()
        self.prefill.end()

    def snapshot(self) -> dict[str, LevelSnapshot]:
        """By phase, ``decode`` and ``prefill``, those that have a row."""
        each = {"decode": self.decode.snapshot(), "prefill": self.prefill.snapshot()}
        return {name: level for name, level in each.items() if level is not None}

    def add(self, other: Level) -> None:
        """Rows of both; the level starts over."""
        for mine, theirs in ((self.decode, other.decode), (self.prefill, other.prefill)):
            mine.rows += theirs.rows
            mine.last_ns = max(mine.last_ns, theirs.last_ns)
        self.end()
