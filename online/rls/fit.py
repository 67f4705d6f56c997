"""The fit: stratified statistics, and the published coefficients that solve them.

    G    = sum over strata of decayed w z z'                      z = [x, phase, y, l], G: (q, q) (online/rls/strata.py)
    beta = argmin over beta_j >= 0 where not free   beta' (A + H) beta - 2 (b + H beta0)' beta      A, b: blocks of G
    H_jj = (max(min(s, 3 %), misfit) / sd_j)^2                    beta0, sd: the prior; s: scale (online/rls/prior.py)

A prior that the rows contradict (online/rls/prior.py) is dropped: their own fit is published from then on.

Guarantee: beta is a function of the learned rows alone.
"""

from __future__ import annotations

import copy
import math
from typing import ClassVar

import numpy as np

from online.blocks import STRATA, Design
from online.constants import TINY
from online.features import INTERCEPT, FeatureSet
from online.rows import Floats, Mask, Target
from online.state import StateError, Stateful, Tree

from .error_bars import Meat, Shapes
from .identify import Diagnosis, Evidence, diagnose
from .prior import Prior, contradicted
from .solve import solve
from .strata import Strata

BY_POINT = ("portable", Target.STEP_TIME)
"""What is kept by operating point, too: columns that data sheets and other configurations say something of."""


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
        per_row: diagonal of A per row, (p,).
        strata, meat: what is remembered, for the coefficients and for their error bars.
    """

    SAVED: ClassVar[tuple[str, ...]] = ("beta", "passive", "live", "per_row", "strata", "meat")

    def __init__(self, features: FeatureSet, half_life_steps: float, prior: Prior | None = None) -> None:
        p = len(features)
        self.p = p
        self.prior = None if prior is None else prior.sized(p)
        self.free: Mask = np.zeros(p, np.bool_)
        self.intercept: Mask = np.array([name == INTERCEPT for name in features.names], np.bool_)
        self.beta, self.per_row = np.zeros(p), np.zeros(p)
        self.passive: Mask = np.zeros(p, np.bool_)
        self.live: Mask = np.zeros(p, np.bool_)
        self.strata = Strata(p + 2, half_life_steps, by_point=(features.name, features.target) == BY_POINT)
        self.meat = Meat(p)

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
        """Give it ``more`` columns, free of sign, after its p."""
        self.strata.widen(self.p, more)
        self.meat = self.meat.widened(more)
        self.p += more
        self.prior = None if self.prior is None else self.prior.sized(self.p)
        self.free = np.concatenate([self.free, np.ones(more, np.bool_)])
        for name in ("intercept", "beta", "passive", "live", "per_row"):
            value = getattr(self, name)
            setattr(self, name, np.concatenate([value, np.zeros(more, value.dtype)]))

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

    def discount(self, keep: float, gain: float) -> None:
        """Keep so much of what was known, at a new speed."""
        self.strata.discount(keep, gain)
        self.meat.discount(keep)

    def discount_prefill(self, keep: float, gain: float) -> None:
        """Keep little of what was known of steps with prefill, at their new speed."""
        self.strata.discount(keep, gain, slice(STRATA // 2, None))

    def decay(self, spent: Floats) -> None:
        """Forget as if rows worth ``spent`` (32,) half-lives had been learned in each stratum."""
        self.strata.decay(spent)
        self.meat.decay(spent)

    def add(self, other: Fit) -> None:
        """Statistics of both; see Strata.add."""
        self.strata.add(other.strata)
        self.meat.add(other.meat)

    # ---------------------------------------------------------------- solving

    def precision(self, scale: float) -> Floats | None:
        """Diagonal of H without the solver's relative ridge, (p,); None = no prior of any kind."""
        return None if self.prior is None else self.prior.precision(scale)

    def prior_mean(self, scale: float) -> Floats | None:  # noqa: ARG002 -- where precision() mixes, it depends on it
        """What H pulls to, (p,); None = 0."""
        return None if self.prior is None else self.prior.mean

    def solve(self, g: Floats, scale: float) -> Floats:
        """Solve statistics (q, q) for beta (p,), and keep it."""
        p = self.p
        solution = solve(
            g[:p, :p],
            g[:p, p],
            self.free,
            self.passive | ~self.live,
            prior_precision=self.precision(scale),
            prior_mean=self.prior_mean(scale),
        )
        self.beta, self.passive, self.live = solution.beta, solution.passive, solution.live
        return self.beta

    def solve_strata(self, scale: float) -> None:
        """Solve what is remembered; a prior that it contradicts is dropped."""
        p, g = self.p, self.strata.total()
        self.per_row = g.diagonal()[:p] / max(float(self.strata.n1.sum()), 1.0)
        self.solve(g, scale)
        if self.prior is not None:
            own = solve(g[:p, :p], g[:p, p], self.free, self.passive).beta
            if contradicted(_misfit(g, self.beta), _misfit(g, own)):
                self.prior = None
                self.solve(g, scale)

    def diagnosis(self, g: Floats, scale: float, variance: float, shapes: Shapes | None) -> Diagnosis:
        """Error bars and status of beta, which solves g (q, q); ``variance`` is of the residuals, in weighted units."""
        p, precision, prior = self.p, self.precision(scale), self.prior
        columns = int(np.count_nonzero(self.live))
        evidence = Evidence(
            beta=self.beta,
            passive=self.passive,
            live=self.live,
            has_prior=np.zeros(p, np.bool_) if prior is None else prior.precision(1.0) > 0.0,
            intercept=self.intercept,
            a=g[:p, :p],
            precision=np.zeros(p) if precision is None else precision,
            prior=np.zeros(p) if prior is None else prior.score_variance(scale),
            with_steps=g[:p, p + 1],
            steps=max(float(g[p + 1, p + 1]), TINY),
            variance=variance * self.strata.squared_share(),
            meat=self.meat.of_scores(columns),
            carried=self.meat.carries(columns),
            spread=self.strata.spread(),
            rows=float(self.strata.n1.sum()),
            shapes=shapes,
        )
        return diagnose(evidence)


def residual_squares(g: Floats, beta: Floats) -> float:
    """Weighted sum of squares that coefficients (p,) leave of y in statistics G (q, q), y behind the p columns."""
    p = len(beta)
    return float(beta @ g[:p, :p] @ beta - 2.0 * (g[p, :p] @ beta) + g[p, p])


def _misfit(g: Floats, beta: Floats) -> float:
    """Root mean square of what coefficients (p,) leave of y, relative to y."""
    p = len(beta)
    return math.sqrt(max(residual_squares(g, beta), 0.0) / max(float(g[p, p]), TINY))
