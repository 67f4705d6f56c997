"""Standard errors that survive autocorrelated noise: decayed HAC meat, windowed by 128 rows.

    score_i = w_i r_i x_i                        (p,)       w: weight, r = y - x beta (prequential)
    g_s     = sum of scores of stratum s in a window of 128 rows,  g = sum_s g_s,  g- = g of the window before
    M_s    <- kept_s^2 M_s + (g_s (g + g-)' + (g + g-) g_s') / 2        (p, p), upper triangle
              sum_s M_s = sum of g g' + (g g-' + g- g') / 2             Newey and West with one lag of windows
    V       = C M C  B / (B - p)                 C = (A + H)^-1, B: windows remembered

Noise of the clock or of neighbours lasts for tens of steps, so s^2 C is a third too small (AR(1) 0.97: its 95 %
intervals cover 67 %). Splitting g g' among the strata lets each forget on its own clock, as A does; kept is squared
because V of a weighted fit has squared weights. With fewer than 2 p + 2 windows s^2 C stands in.
Reference: Newey and West (Econometrica 1987); Ibragimov and Mueller (JBES 2010).
"""

from __future__ import annotations

import numpy as np

from online.blocks import STRATA, Groups
from online.rows import Floats
from online.state import Count, saved

WINDOW_ROWS = 128


class Meat:
    """M of p columns in 32 strata, and the window that is being filled."""

    STATE = saved("meat", m=Floats, windows=Floats, window=Floats, last=Floats, rows=Count)

    __slots__ = ("_left", "_right", "last", "m", "p", "rows", "window", "windows")

    def __init__(self, p: int) -> None:
        self.p = p
        self._left, self._right = np.triu_indices(p)
        self.m = np.zeros((STRATA, len(self._left)))
        self.windows = np.zeros(STRATA)
        self.window = np.zeros((STRATA, p))
        self.last = np.zeros(p)
        self.rows = 0

    def learn(self, groups: Groups, kept: Floats, scores: Floats) -> None:
        """Scores (n, p) in the order of the groups; kept (g,) is what the strata kept of their statistics."""
        squared = (kept * kept)[:, None]
        self.m[groups.ids] *= squared
        self.windows[groups.ids] *= squared[:, 0]
        self.window[groups.ids] += np.add.reduceat(scores, groups.starts, axis=0)
        self.rows += len(scores)
        if self.rows >= WINDOW_ROWS:
            self._close_window()

    def _close_window(self) -> None:
        mine, own = self.window, self.window.sum(axis=0)
        whole, self.last = own + self.last, own
        left, right = self._left, self._right
        self.m += 0.5 * (mine[:, left] * whole[right] + whole[left] * mine[:, right])
        # Windows are shared out as the rows are: by nothing better than which strata took part.
        part = mine.any(axis=1)
        self.windows += part * (self.rows / WINDOW_ROWS / max(1, int(part.sum())))
        self.window[:] = 0.0
        self.rows = 0

    def total(self) -> tuple[Floats, float]:
        """M as a full matrix (p, p), and how many windows it remembers."""
        matrix = np.zeros((self.p, self.p))
        matrix[self._left, self._right] = self.m.sum(axis=0)
        matrix[self._right, self._left] = matrix[self._left, self._right]
        return matrix, float(self.windows.sum())

    def discount(self, keep: float) -> None:
        """Keep this share of the evidence, whose weights are squared here."""
        self.m *= keep * keep
        self.windows *= keep * keep
        self.window *= keep
        self.last *= keep

    def decay(self, spent: Floats) -> None:
        """Forget as the strata do; see Strata.decay."""
        squared = np.exp2(-2.0 * np.minimum(spent, 500.0))
        self.m *= squared[:, None]
        self.windows *= squared

    def add_between(self, products: Floats, rows: Floats) -> None:
        """Products of scores (p, p) of whole streams, shared out among the strata by their rows (32,)."""
        share = rows / max(float(rows.sum()), 1e-300)
        self.m += share[:, None] * products[self._left, self._right]

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
        wide.last[: self.p] = self.last
        wide.windows, wide.rows = self.windows, self.rows
        return wide
