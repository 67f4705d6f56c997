"""Which columns matter: automatic relevance determination on the same decayed statistics, for ``bsr_ard``.

Each coefficient has a zero-mean normal prior of its own precision alpha_j. The evidence of the rows decides alpha_j,
and columns that do not matter are pruned. With H = s^2 diag(alpha) (s: relative noise scale), on the columns in use

    C = (A + H)^-1                  posterior covariance = s^2 C, mean = C b
    S_j = (A_jj - A_j C A_j') / s^2        Q_j = (b_j - A_j C b) / s^2       s_j, q_j: the same without column j
    alpha_j = s_j^2 / (q_j^2 - s_j)  where q_j^2 > s_j,  else the column is pruned (alpha_j = infinite)

Each solve makes the change that raises the evidence most, a few times. A donor's prior is a few rows more: A + K and
b + K m stand for A and b, K its precision and m its mean. So a relevance pulls to 0, never to m, and what a donor
thinks relevant is pruned once the rows say otherwise. The statistics keep every column, so a pruned column comes back
when the rows ask for it. Intercept and phases are always in use.

Reference: Tipping and Faul, Fast marginal likelihood maximisation for sparse Bayesian models (AISTATS 2003).
"""

from __future__ import annotations

import numpy as np

from online.constants import TINY
from online.rows import Floats, Mask
from online.state import Stateful

from .solve import RELATIVE_RIDGE

# Guard: stands for infinity, relative to the column's own diagonal of A: coefficient 0 for every purpose.
_PRUNED = 1e12
# Guard: cost of a solve. Guess: the log evidence below which a change is not worth making.
_CHANGES_MAX, _LEAST_GAIN = 4, 1e-3


class Relevance(Stateful):
    """Of p columns.

    Args:
        always: columns that are always in use, (p,).

    Attributes:
        alpha: prior precision per column in 1 / us^2 of its coefficient, (p,); negative = pruned.
        weight: diagonal of A + K, (p,): the unit of a pruned column's precision.
    """

    SAVED = ("alpha", "weight")

    def __init__(self, always: Mask) -> None:
        self._always = always
        self.alpha, self.weight = np.where(always, 0.0, -1.0), np.zeros(len(always))

    @property
    def used(self) -> Mask:
        """Columns in use, (p,)."""
        used: Mask = self.alpha >= 0.0
        return used

    def widen(self, more: int) -> None:
        """``more`` columns at the end: phases, which are always in use."""
        self._always = np.pad(self._always, (0, more), constant_values=True)
        self.alpha, self.weight = np.pad(self.alpha, (0, more)), np.pad(self.weight, (0, more))

    def precision(self, scale: float) -> Floats:
        """The relevance of each column as a prior's precision, (p,)."""
        return np.where(self.used, scale**2 * self.alpha, _PRUNED * self.weight)

    def learn(self, a: Floats, b: Floats, variance: float, free: Mask) -> None:
        """Change relevances where that raises the evidence of A + K (p, p), b + K m (p,) and s^2; ``free``: of sign."""
        self.weight = np.maximum(a.diagonal(), TINY)
        for _ in range(_CHANGES_MAX):
            s, q, inside = self._without_each(a, b, variance)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                # A column that can only enter with the wrong sign is not relevant: coefficients are non-negative.
                relevant = (q * q > s) & (s > 0.0) & ((q > 0.0) | free)
                alpha = np.where(relevant, s * s / (q * q - s), -1.0)
                gain = np.where(relevant, _evidence(alpha, s, q), 0.0) - np.where(
                    inside, _evidence(self.alpha, s, q), 0.0
                )
            gain[self._always] = 0.0
            best = int(np.argmax(gain))
            if not gain[best] > _LEAST_GAIN:
                return
            self.alpha[best] = alpha[best]

    def _without_each(self, a: Floats, b: Floats, variance: float) -> tuple[Floats, Floats, Mask]:
        """s_j and q_j of the module's equations, (p,) each, and which columns are in use and may be pruned, (p,)."""
        diagonal = a.diagonal()
        on = self.used & (diagonal > 0.0)
        system = (a + np.diag(np.where(on, variance * self.alpha, 0.0) + RELATIVE_RIDGE * diagonal))[np.ix_(on, on)]
        scale = 1.0 / np.sqrt(np.maximum(system.diagonal(), TINY))
        inverse = np.linalg.inv(system * scale * scale[:, None] + 1e-12 * np.eye(len(system)))
        inverse *= scale * scale[:, None]
        cross = a[:, on]
        s_all = (diagonal - np.einsum("ij,jk,ik->i", cross, inverse, cross)) / variance
        q_all = (b - cross @ (inverse @ b[on])) / variance
        inside = on & ~self._always
        alpha = np.where(inside, self.alpha, 1.0)
        factor = np.where(inside, alpha / np.maximum(alpha - s_all, 1e-12 * alpha), 1.0)
        return factor * s_all, factor * q_all, inside


def _evidence(alpha: Floats, s: Floats, q: Floats) -> Floats:
    """Contribution of columns with precision alpha to the log evidence, against leaving them out."""
    value = 0.5 * (np.log(np.maximum(alpha, TINY) / (alpha + s)) + q * q / (alpha + s))
    return np.asarray(np.where(alpha > 0.0, value, 0.0))
