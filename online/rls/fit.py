"""The fit: stratified statistics, and the published coefficients that solve them.

    G    = sum over strata of decayed w z z'                      z = [x, phase, y, l], G: (q, q) (online/rls/strata.py)
    beta = argmin over beta_j >= 0 where not free   beta' (A + H) beta - 2 (b + H beta0)' beta      A, b: blocks of G

H and beta0 are the prior's (online/rls/solve.py); a prior that the rows contradict is dropped, and their own fit is
published from then on. ``bsr_ard`` finds a precision for each column beside (online/rls/relevance.py).

Guarantee: beta is a function of the learned rows alone.
"""

from __future__ import annotations

import copy
import math

import numpy as np

from online.blocks import STRATA, Design
from online.constants import TINY
from online.features import INTERCEPT, FeatureSet
from online.rows import Floats, Mask, Target
from online.state import StateError, Stateful, Tree

from .error_bars import Meat
from .relevance import Relevance
from .solve import Prior, contradicted, solve
from .strata import Strata

_BY_POINT = ("portable", Target.STEP_TIME)
"""What is kept by operating point, too: columns that data sheets and other configurations say something of."""
_RELEVANCE_SETS = frozenset({"bsr_ard"})
"""Sets whose columns are pruned."""


class Fit(Stateful):
    """Statistics and solution of p columns.

    Attributes:
        p: features and phases.
        prior: of the coefficients, if there is one.
        free: columns that may be negative, (p,).
        intercept: the column of that name, (p,).
        beta: published coefficients and phases, (p,).
        passive: columns that are off their bound, (p,).
        live: columns with evidence or a prior, (p,).
        strata, meat: what is remembered, for the coefficients and for their error bars.
        relevance: of the columns, where they are pruned.
    """

    SAVED = ("beta", "passive", "live", "strata", "meat", "relevance")

    def __init__(self, features: FeatureSet, half_life_steps: float, prior: Prior | None = None) -> None:
        self.p = p = len(features)
        self.prior = None if prior is None else prior.sized(p)
        self.intercept: Mask = np.array([name == INTERCEPT for name in features.names], np.bool_)
        self.beta = np.zeros(p)
        self.free, self.passive, self.live = (np.zeros(p, np.bool_) for _ in range(3))
        self.strata = Strata(p + 2, half_life_steps, by_point=(features.name, features.target) == _BY_POINT)
        self.meat = Meat(p)
        always = np.array([column.formula == INTERCEPT for column in features.columns], np.bool_)
        self.relevance = Relevance(always) if features.name in _RELEVANCE_SETS else None

    def to_state(self) -> Tree:
        """See Stateful."""
        return super().to_state() | {"prior": None if self.prior is None else self.prior.to_state()}

    def from_state(self, state: Tree) -> None:
        """See Stateful; a prior is of its columns."""
        super().from_state(state)
        self.prior = None if state["prior"] is None else Prior.of_state(state["prior"])
        if self.prior is not None and len(self.prior.mean) != self.p:
            raise StateError(f"a prior of {len(self.prior.mean)} columns, expected {self.p}")

    def widen(self, more: int) -> None:
        """``more`` columns, free of sign, after its p."""
        self.strata.widen(self.p, more)
        self.meat.widen(more)
        self.p += more
        self.prior = None if self.prior is None else self.prior.sized(self.p)
        if self.relevance is not None:
            self.relevance.widen(more)
        for name in ("free", "intercept", "beta", "passive", "live"):
            setattr(self, name, np.pad(getattr(self, name), (0, more), constant_values=name == "free"))

    # ---------------------------------------------------------------- learning

    def learn(self, block: Design, z: Floats, weight: Floats, share: Floats, prediction: Floats) -> None:
        """Add rows z (n, q) of weight, Huber's share and prediction (n,)."""
        kept, left = self.strata.learn(block, z, weight, share)
        self.meat.learn(block, kept, z[:, : self.p] * (left * weight * (block.elapsed_us - prediction))[:, None])

    def learn_held(self, held: Design, z: Floats, weight: Floats, share: Floats) -> None:
        """The rows of the first fit become statistics; their scores count whole."""
        self.strata.learn(held, z, weight, share)
        residual = held.elapsed_us - z[:, : self.p] @ self.beta
        self.meat.learn(held, np.ones(len(held.grouped().ids)), z[:, : self.p] * (weight * residual)[:, None])

    def with_held(self, held: Design, z: Floats, weight: Floats, share: Floats) -> Fit:
        """A copy as if the rows of the first fit were statistics; only what error bars ask for is made."""
        fit = copy.copy(self)
        fit.strata, fit.meat = Strata(self.p + 2, self.strata.half_life_steps), Meat(self.p)
        fit.learn_held(held, z, weight, share)
        return fit

    def discount(self, keep: float, gain: float, *, prefill: bool) -> None:
        """Keep so much of what was known, at a new speed; of steps with ``prefill`` alone, or of all."""
        self.strata.discount(keep, gain, slice(STRATA // 2, None) if prefill else slice(None))
        if not prefill:
            self.meat.discount(keep)

    def decay(self, spent: Floats) -> None:
        """Forget as if rows worth ``spent`` (32,) half-lives had been learned in each stratum."""
        self.strata.decay(spent)
        self.meat.decay(spent)

    def add(self, other: Fit) -> None:
        """Statistics of both; see Strata.add."""
        self.strata.add(other.strata)
        self.meat.add(other.meat)

    # ---------------------------------------------------------------- solving

    def precision(self, scale: float) -> Floats:
        """Diagonal of H without the solver's relative ridge, (p,)."""
        known = np.zeros(self.p) if self.prior is None else self.prior.precision(scale)
        return known if self.relevance is None else known + self.relevance.precision(scale)

    def solve(self, g: Floats, scale: float) -> Floats:
        """Solve statistics (q, q) for beta (p,), and keep it."""
        a, b, known, mean = g[: self.p, : self.p], g[: self.p, self.p], np.zeros(self.p), np.zeros(self.p)
        if self.prior is not None:
            known, mean = self.prior.precision(scale), self.prior.mean
        if self.relevance is not None:
            self.relevance.learn(a + np.diag(known), b + known * mean, scale**2, self.free)
        h = self.precision(scale)
        pull = np.divide(known * mean, h, out=np.zeros(self.p), where=h > 0.0)  # a relevance pulls to 0
        found = solve(a, b, self.free, self.passive | ~self.live, prior_precision=h, prior_mean=pull)
        self.beta, self.passive, self.live = found.beta, found.passive, found.live
        if self.relevance is not None:
            pruned = ~self.relevance.used
            self.beta[pruned], self.passive[pruned] = 0.0, False
        return self.beta

    def solve_strata(self, scale: float) -> None:
        """Solve what is remembered; a prior that it contradicts is dropped."""
        p, g = self.p, self.strata.total()
        self.solve(g, scale)
        if self.prior is not None:
            own = solve(g[:p, :p], g[:p, p], self.free, self.passive).beta
            if contradicted(_misfit(g, self.beta), _misfit(g, own)):
                self.prior = None
                self.solve(g, scale)


def residual_squares(g: Floats, beta: Floats) -> float:
    """Weighted sum of squares that coefficients (p,) leave of y in statistics G (q, q), y behind the p columns."""
    p = len(beta)
    return float(beta @ g[:p, :p] @ beta - 2.0 * (g[p, :p] @ beta) + g[p, p])


def _misfit(g: Floats, beta: Floats) -> float:
    """Root mean square of what coefficients (p,) leave of y, relative to y."""
    return math.sqrt(max(residual_squares(g, beta), 0.0) / max(float(g[len(beta), len(beta)]), TINY))
