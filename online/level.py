"""Level: by how much the steps of the last rows took longer than x beta F, apart for steps with and without prefill.

    r_i = log(y_i / (x_i beta F))                  v_i = clip(r_i, -0.25, 0.25): one stall moves no level
    m_h   exponentially weighted mean of v         half-lives h of 8, 20 and 60 rows: River's ``stats.EWMean``
    c_i = m_h as it was before row i               h: of the smallest discounted error so far; or no level, m_0 = 0
    D_h   the same errors of means that are one to two seconds old: the level that readers get is of the smallest D_h

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

import numpy as np
from river import stats

from .blocks import STRATA, Design
from .errors import Contest
from .rows import Floats, Ints
from .snapshot import LevelSnapshot
from .state import Stateful

# Guess: half or twice as long move errors by 0.1 points; 20 rows alone leave 0.3 points more of the median error.
HALF_LIVES_ROWS = (8, 20, 60)
# Chosen: on the recordings c0, c1, c3, c5, c9 and p1; of River's correction, too, which errs as much with 0.15.
LEVEL_MAX = 0.25
# Derived: a reader has what it reads a second or more later; after so long the means that it has are renewed.
LATE_NS = 1_000_000_000


class PhaseLevel(Stateful):
    """The level of the steps with prefill, or of those without.

    Attributes:
        rows: how many were learned.
        last_ns: end of the newest of them, event time; 0 before the first.
        now, late: contests of m_0 and the m_h, as they are and as readers have them.
        late_means, late_ns: m_0 and m_h of two moments a second apart, (2, 4), the older of which readers have.
    """

    SAVED = ("rows", "last_ns", "now", "late", "late_means", "late_ns", "means")

    def __init__(self) -> None:
        self.rows = self.last_ns = 0
        self.end()

    def end(self) -> None:
        """Forget the level; rows stay counted."""
        size = 1 + len(HALF_LIVES_ROWS)
        self._means: list[stats.EWMean] = []
        self.now, self.late = Contest(size), Contest(size)
        self.late_means, self.late_ns = np.zeros((2, size)), 0

    @property
    def means(self) -> list[float]:
        """m_h by half-life; none before the first row."""
        return [mean.get() for mean in self._means]

    @means.setter
    def means(self, values: list[float]) -> None:
        self._means = _fresh_means() if values else []
        for mean, value in zip(self._means, values, strict=True):
            mean.update(value)  # River takes the first value as it is

    def learn(self, log_ratio: Floats, end_ns: Ints) -> Floats:
        """Rows r (n,) and their ends, in order of time; c of each by the rows before it, (n,)."""
        n, first_ns = len(log_ratio), int(end_ns[0])
        if first_ns >= self.late_ns + LATE_NS:
            means = self.means or [0.0] * len(HALF_LIVES_ROWS)
            self.late_means, self.late_ns = np.array((self.late_means[1], (0.0, *means))), first_ns
        self.rows += n
        self.last_ns = max(self.last_ns, int(end_ns.max()))
        values = np.minimum(np.maximum(log_ratio, -LEVEL_MAX), LEVEL_MAX).tolist()
        self._means = self._means or _fresh_means()
        by_half_life = [[0.0] * n]
        for mean in self._means:
            known = list[float]()
            for value in values:
                known.append(mean.get())
                mean.update(value)
            by_half_life.append(known)
        before = np.array(by_half_life)
        self.late.learn(self.late_means[0, :, None], log_ratio)
        chosen: Floats = before[self.now.learn(before, log_ratio), np.arange(n)]
        return chosen

    def snapshot(self) -> LevelSnapshot:
        """The level for a reader."""
        chosen = self.late.best()
        return LevelSnapshot(
            factor=math.exp(self.means[chosen - 1]) if chosen else 1.0,
            half_life_rows=HALF_LIVES_ROWS[chosen - 1] if chosen else None,
            rows=self.rows,
            last_row_unix_nano=self.last_ns,
        )


def _fresh_means() -> list[stats.EWMean]:
    return [stats.EWMean(1.0 - 0.5 ** (1.0 / rows)) for rows in HALF_LIVES_ROWS]


class Level(Stateful):
    """Both of them, of one target."""

    SAVED = ("decode", "prefill")

    def __init__(self) -> None:
        self.decode, self.prefill = PhaseLevel(), PhaseLevel()

    def learn(self, block: Design, log_ratio: Floats) -> Floats:
        """Rows of a block, r (n,); c of each, (n,)."""
        level, with_prefill = np.empty(len(log_ratio)), block.stratum >= STRATA // 2
        for phase, here in ((self.decode, ~with_prefill), (self.prefill, with_prefill)):
            if here.any():
                level[here] = phase.learn(log_ratio[here], block.end_ns[here])
        return level

    def end(self) -> None:
        """A change of speed was confirmed, or states were merged."""
        self.decode.end()
        self.prefill.end()

    def snapshot(self) -> dict[str, LevelSnapshot]:
        """Levels by phase, ``decode`` and ``prefill``, of phases with a row."""
        phases = {"decode": self.decode, "prefill": self.prefill}
        return {name: phase.snapshot() for name, phase in phases.items() if phase.rows}

    def add(self, other: Level) -> None:
        """Rows of both; the level starts over."""
        for mine, theirs in ((self.decode, other.decode), (self.prefill, other.prefill)):
            mine.rows += theirs.rows
            mine.last_ns = max(mine.last_ns, theirs.last_ns)
        self.end()
