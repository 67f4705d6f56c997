"""Standard errors that survive autocorrelated noise: decayed HAC meat over windows that grow with the evidence.

    score_i = w_i r_i x_i                        (p,)       w: weight, r = y - x beta (prequential; held rows: fitted)
    g_s     = sum of scores of stratum s in a window of W rows,  g = sum_s g_s,  g- = g of the window before
    M_s    <- kept_s^2 M_s + (g_s (g + g-)' + (g + g-) g_s') / 2        (p, p), upper triangle
              sum_s M_s = sum of g g' + (g g-' + g- g') / 2             Newey and West with one lag of windows
    V       = C M C G (1 + 1.21 / (B - p))^2     C = (A + H)^-1, B: windows remembered; the shortest's: B / (B - p)
    G       = max_j M_jj    / M'_jj              for W = 128, M' those of 32; 1 to 3; else 1

for W = 32, 128 and 384 rows side by side. Noise of the clock or of neighbours lasts for tens of steps, so s^2 C is a
third too small (AR(1) 0.97: its 95 % intervals cover 67 %), and windows shorter than the noise miss some of it. Long
ones are few at first: the longest of which there are enough carries the error bars: p + 4 (of the shortest: p + 2).
Until then, where M grew from 32 to 128 rows the noise outlasts them, and M is taken to grow as much once more.
Splitting g g' among the strata lets each forget on its own clock, as A does; kept is squared because V of a weighted
fit has squared weights. Rows of weight 1/k fill a k-th of a row of a window.
Reference: Newey and West (Econometrica 1987); Ibragimov and Mueller (JBES 2010).
"""

from __future__ import annotations

import numpy as np

from online.blocks import STRATA, Design, Groups
from online.rows import Floats, Ints, Mask
from online.state import saved

WINDOW_ROWS = (32, 128, 384)
FREE_MIN = (2, 4, 4)
"""Windows beyond the number of columns from which on a length counts."""

STUDENT = 1.21
"""1.96 (1 + 1.21 / f) is Student's 97.5 % quantile at f degrees of freedom, within 4 % from f = 2 on."""

GROWTH_MAX = 3.0
"""384 / 128: as much as windows can err together."""

_LENGTHS = len(WINDOW_ROWS)
_UNIT = WINDOW_ROWS[0]
"""Rows that every length is a multiple of."""
_FIRST = np.arange(_LENGTHS) * STRATA


class Meat:
    """M of p columns in 32 strata per length of window, one length below the other, and the windows being filled."""

    STATE = saved("meat", m=Floats, windows=Floats, window=Floats, last=Floats, rows=Floats)

    __slots__ = ("_left", "_right", "_triangles", "last", "m", "p", "rows", "window", "windows")

    def __init__(self, p: int) -> None:
        self.p = p
        self._left, self._right = np.triu_indices(p)
        self._triangles = self._left * p + self._right, self._right * p + self._left
        self.m = np.zeros((_LENGTHS * STRATA, len(self._left)))
        self.windows = np.zeros(_LENGTHS * STRATA)
        self.window = np.zeros((_LENGTHS * STRATA, p))
        self.last = np.zeros((_LENGTHS, p))
        self.rows = np.zeros(_LENGTHS)

    def learn(self, block: Design, kept: Floats, scores: Floats) -> None:
        """Scores (n, p) of a block, forgotten as its later rows make them; kept (g,): by its strata of their past."""
        groups = block.grouped()
        ids, window = groups.ids, self.window.reshape(_LENGTHS, STRATA, -1)
        left = np.ones((_LENGTHS, STRATA))
        left[:, ids] = kept
        by_stratum = left.reshape(-1, 1)
        self.window *= by_stratum
        by_stratum *= by_stratum
        self.m *= by_stratum
        self.windows *= by_stratum[:, 0]
        rows = self.rows[0] + np.cumsum(block.weight)
        units = int(rows[-1] // _UNIT)
        if not units:
            window[:, ids] += np.add.reduceat(scores.take(groups.order, axis=0), groups.starts, axis=0)
            self.rows = self.rows // _UNIT * _UNIT + rows[-1]
            return
        number = np.minimum(np.maximum(np.ceil(rows / _UNIT) - 1.0, 0.0), units).astype(np.int64)
        visited: Mask = np.asarray(window.any(axis=(0, 2)))
        visited[ids] = True
        strata = visited.nonzero()[0]
        sums = self._by_unit(block, number, scores, units + 1)[:, strata]
        for length, size in enumerate(WINDOW_ROWS):
            per_window, before = size // _UNIT, int(self.rows[length] // _UNIT)
            starts = [0, *range(max(1, per_window - before), units + 1, per_window)]
            self._fill(length, strata, np.add.reduceat(sums, starts, axis=0))
            held = before + units - (len(starts) - 1) * per_window
            self.rows[length] = held * _UNIT + rows[-1] - units * _UNIT

    def _by_unit(self, block: Design, number: Ints, scores: Floats, units: int) -> Floats:
        """Sums of scores by unit and stratum, (units, 32, p); ``number``: the unit of each row, (n,)."""
        groups = Groups.of(number * STRATA + block.stratum)
        sums = np.zeros((units * STRATA, self.p))
        sums[groups.ids] = np.add.reduceat(scores.take(groups.order, axis=0), groups.starts, axis=0)
        return sums.reshape(units, STRATA, self.p)

    def _fill(self, length: int, strata: Ints, sums: Floats) -> None:
        """Sums (windows, s, p) of these strata go to the open window and to those behind it; the last stays open."""
        places = strata + _FIRST[length]
        sums[0] += self.window[places]
        self.window[places] = sums[-1]
        count = len(sums) - 1
        if not count:
            return
        closed = sums[:-1]
        own = closed.sum(axis=1)
        whole = own.copy()
        whole[0] += self.last[length]
        whole[1:] += own[:-1]
        self.last[length] = own[-1]
        products = (closed.reshape(count, -1).T @ whole).reshape(len(strata), -1)
        upper, lower = self._triangles
        self.m[places] += 0.5 * (products.take(upper, axis=1) + products.take(lower, axis=1))
        # A window is shared out as the rows are: by nothing better than which strata took part.
        part = closed.any(axis=2)
        self.windows[places] += (part / np.maximum(part.sum(axis=1), 1)[:, None]).sum(axis=0)

    def learn_held(self, held: Design, scores: Floats) -> None:
        """Scores (n, p) of the rows of the first fit."""
        self.learn(held, np.ones(len(held.grouped().ids)), scores)

    def of_scores(self, columns: int) -> Floats | None:
        """M times Student's share for a fit of so many columns, (p, p); None while windows are too few."""
        counts = self.windows.reshape(_LENGTHS, STRATA).sum(axis=1)
        for length in reversed(range(_LENGTHS)):
            # What is forgotten of a window is not missing: half a one less will do.
            free = float(counts[length]) - columns
            if free >= FREE_MIN[length] - 0.5:
                matrix = np.zeros((self.p, self.p))
                sums = self._sums(length)
                matrix[self._left, self._right] = matrix[self._right, self._left] = sums
                # Later scores are of rows not yet learned; those of the first fit fill the shortest windows.
                spare = (free + columns) / free if length == 0 else self._growth(length)
                return matrix * (spare * (1.0 + STUDENT / free) ** 2)
        return None

    def _sums(self, length: int) -> Floats:
        """M of all strata for one length, upper triangle."""
        sums: Floats = self.m[_FIRST[length] : _FIRST[length] + STRATA].sum(axis=0)
        return sums

    def _growth(self, length: int) -> float:
        """G of the module's equations, by the next shorter windows; the longest are taken as they are."""
        longer, shorter = self._sums(length), self._sums(length - 1)
        variances = (self._left == self._right) & (shorter > 0.0)
        if length == _LENGTHS - 1 or not variances.any():
            return 1.0
        return min(max(float(np.max(longer[variances] / shorter[variances])), 1.0), GROWTH_MAX)

    @staticmethod
    def tells_of(rows: float, columns: int) -> bool:
        """Whether so many rows may fill the windows that a fit of so many columns needs."""
        return rows >= _UNIT * (columns + FREE_MIN[0] - 0.5)

    def carries(self, columns: int) -> bool:
        """Whether there are windows enough for a fit of so many columns to be called known: 2 p + 2."""
        return float(self.windows[:STRATA].sum()) >= 2 * columns + 1.5

    def discount(self, keep: float) -> None:
        """Keep this share of the evidence, whose weights are squared here."""
        self.m *= keep * keep
        self.windows *= keep * keep
        self.window *= keep
        self.last *= keep

    def decay(self, spent: Floats) -> None:
        """Forget as the strata do; see Strata.decay."""
        squared = np.tile(np.exp2(-2.0 * np.minimum(spent, 500.0)), _LENGTHS)
        self.m *= squared[:, None]
        self.windows *= squared

    def add(self, other: Meat) -> None:
        """Evidence of both; open windows are not joined."""
        self.m += other.m
        self.windows += other.windows

    def widened(self, more: int) -> Meat:
        """The same evidence with ``more`` columns, never seen, at the end."""
        wide = Meat(self.p + more)
        keep = wide._right < self.p
        wide.m[:, keep] = self.m
        wide.window[:, : self.p] = self.window
        wide.last[:, : self.p] = self.last
        wide.windows, wide.rows = self.windows, self.rows
        return wide
