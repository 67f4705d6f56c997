"""BSR-ARD: automatic relevance determination on the decayed statistics.

    y = x beta + e,  e ~ N(0, s^2)      beta_j ~ N(0, 1 / alpha_j)      A = sum w x x', b = sum w x y (relative units)
    C  = (A + s^2 diag(alpha))^-1 on the columns in use                 posterior covariance = s^2 C, mean = C b

Each solve looks at one statistic pair per column,

    S_j = (A_jj - A_j C A_j') / s^2        Q_j = (b_j - A_j C b) / s^2       s_j, q_j: the same without column j
    alpha_j = s_j^2 / (q_j^2 - s_j)  where q_j^2 > s_j,  else the column is pruned (alpha_j = infinite)

and makes the change that raises the evidence most, a few times. A donor's prior is a few rows more: A + K and b + K m
stand for A and b, K is H of online/rls/prior.py and m its mean. So a relevance pulls to 0, never to m, and what a donor
thinks relevant is pruned once the rows say otherwise. The statistics keep every column, so a pruned column comes back
when the data ask for it: pruning is reversible, which is what an online learner needs. Intercept and phases are always
in use. The constraint beta >= 0 is the solver's; a column it holds at zero is pruned by the next pass.

Reference: Tipping and Faul, Fast marginal likelihood maximisation for sparse Bayesian models (AISTATS 2003).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from online.constants import TINY
from online.features import INTERCEPT, FeatureSet
from online.rows import Floats, Mask

from .fit import Fit
from .prior import Prior
from .solve import RELATIVE_RIDGE

# Guard: stands for infinity.
PRUNED = 1e12
"""Precision of a pruned column, relative to its own diagonal of A: coefficient 0 for every purpose."""

# Guard: cost of a solve.
_CHANGES_MAX = 4
# Guess: the log evidence below which a change is not worth making.
_LEAST_GAIN = 1e-3


class RelevantFit(Fit):
    """A fit whose prior precisions are found by evidence maximisation.

    Attributes:
        alpha: prior precision per column in 1 / us^2 of its coefficient, (p,); negative = pruned.
        weight: diagonal of A, (p,): the unit of a pruned column's precision.
    """

    SAVED: ClassVar[tuple[str, ...]] = (*Fit.SAVED, "alpha", "weight")

    def __init__(self, features: FeatureSet, half_life_steps: float, prior: Prior | None = None) -> None:
        super().__init__(features, half_life_steps, prior)
        self._names = features.names
        self._always = np.array([c.formula == INTERCEPT for c in features.columns])
        self.weight = np.zeros(self.p)
        self.alpha = np.where(self._always, 0.0, -1.0)

    def widen(self, more: int) -> None:
        """Columns that come later are phases, which are always in use."""
        super().widen(more)
        self._always = np.concatenate([self._always, np.ones(more, np.bool_)])
        self.weight = np.concatenate([self.weight, np.zeros(more)])
        self.alpha = np.concatenate([self.alpha, np.zeros(more)])

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the columns in use."""
        return tuple(name for j, name in enumerate(self._names) if self.alpha[j] >= 0.0)

    def precision(self, scale: float) -> Floats:
        """The relevance of each column, on top of what a prior says of it."""
        relevance = np.where(self.alpha >= 0.0, scale**2 * self.alpha, PRUNED * self.weight)
        return relevance + self._known(scale)

    def _known(self, scale: float) -> Floats:
        """A prior's own precision, (p,): K."""
        return np.zeros(self.p) if self.prior is None else self.prior.precision(scale)

    def prior_mean(self, scale: float) -> Floats | None:
        """A prior's mean, as far as the relevance, which pulls to 0, lets it."""
        if self.prior is None:
            return None
        whole = self.precision(scale)
        return self._known(scale) * self.prior.mean / np.where(whole > 0.0, whole, 1.0)

    def solve(self, g: Floats, scale: float) -> Floats:
        """Change relevances where that raises the evidence, then solve."""
        p, known = self.p, self._known(scale)
        a, b = g[:p, :p] + np.diag(known), g[:p, p]
        if self.prior is not None:
            b = b + known * self.prior.mean
        self.weight = np.maximum(a.diagonal(), TINY)
        for _ in range(_CHANGES_MAX):
            if not self._improve_evidence(a, b, scale**2):
                break
        super().solve(g, scale)
        pruned = self.alpha < 0.0
        self.beta[pruned], self.passive[pruned] = 0.0, False
        return self.beta

    def _improve_evidence(self, a: Floats, b: Floats, variance: float) -> bool:
        """The one change of alpha that raises the evidence most; False when none is worth it."""
        diagonal = a.diagonal()
        on = (self.alpha >= 0.0) & (diagonal > 0.0)
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
        return self._change_relevance(factor * s_all, factor * q_all, inside)

    def _change_relevance(self, s: Floats, q: Floats, on: Mask) -> bool:
        relevance = q * q - s
        # A column that can only enter with the wrong sign is not relevant: coefficients are non-negative.
        relevant = (relevance > 0.0) & (s > 0.0) & ((q > 0.0) | self.free)
        alpha = np.full(len(s), -1.0)
        alpha[relevant] = s[relevant] ** 2 / relevance[relevant]
        gain = np.zeros(len(s))
        gain[relevant] = _evidence(alpha[relevant], s[relevant], q[relevant])
        gain[on] -= _evidence(self.alpha[on], s[on], q[on])
        gain[self._always] = 0.0
        best = int(np.argmax(gain))
        if not gain[best] > _LEAST_GAIN:
            return False
        self.alpha[best] = alpha[best]
        return True


def _evidence(alpha: Floats, s: Floats, q: Floats) -> Floats:
    """Contribution of columns with precision alpha to the log evidence, against leaving them out."""
    value = 0.5 * (np.log(np.maximum(alpha, TINY) / (alpha + s)) + q * q / (alpha + s))
    return np.asarray(np.where(alpha > 0.0, value, 0.0))
