"""What rows say of ``portable``'s coefficients, no surer than the form is right and the machine steady.

    A = W_s (A_s - b_s b_s') summed + B' C B     b = B' C 1     C = (1 + diag(W) K)^-1 diag(W)
    W_s = n_s / ((1 + n_s) sigma^2)              sigma = max(2 %, rms misfit of the points' own fit)
    K_rs = w^2 T / S  exp(-(t_r - t_s)^2 / 2 S^2)                       S^2 = T^2 + d_r^2 + d_s^2

A_s (p, p) and b_s (p,) are relative sums of operating point s, of n_s rows, scaled such that y'Wy = 1; rows of B are
b_s, the mean of a point, and A_s - b_s b_s' is what its rows differ by. A point is one observation of the form, however
many rows it has: where the load never let batch and context vary apart, 30,000 rows move the split of their costs by
0.1 % of a step and misfit by 1 to 3 %, and without the cap they decide it, surely.

The machine's speed wanders. A point that was visited around t_s, give or take d_s, is off by a level of a Gaussian
process in time, N(0, w^2) that forgets as exp(-d^2 / 2 T^2); K is the covariance of the levels. w = 5.2 %, T = 30 s:
levels of half a minute wander by 5 % in the root mean square over seven recordings. So minutes tell how costs compare
better than what they are, and points seen minutes apart do not tell how their costs compare.

Where telemetry hides prefix hits, rows of a point differ by prefill that nobody sees, more than by batch or context.
Then prefill is left out and the mean of a point alone counts: A = B' C B.

Rows that a learner still holds have no weights of their own yet. They are weighed against what is expected, by Tukey's
bisquare with the variance of the expectation: the first requests of a server pay for cold caches and compilation.
Reference: Kennedy and O'Hagan, Bayesian calibration of computer models (JRSS B 2001), the discrepancy term.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from online.blocks import Design
from online.constants import BISQUARE, TINY, TINY_US
from online.features import portable
from online.rls import RlsLearner, points_of, solve
from online.rows import Floats, Target

PREFILL = portable(Target.STEP_TIME).names.index("prefill_tokens")
# Measured: a linear form is off by 1 to 3 % at a point; see the module's head.
MISFIT = 0.02
# Measured: over seven recordings; see the module's head.
_WANDER, _WANDER_S = 0.052, 30.0
# Guess: below, rows and expectation have nothing in common.
_ALL_ODD = 0.05
# Guard: as follows.
_ROWS_MIN = 1e-12
"""A point of which less is left says nothing, and 1 / rows may be no number."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A (p, p) and b (p,); sums of each point over (x, y), (k, p + 1, p + 1), with y'y = 1, and W, (k,)."""

    a: Floats
    b: Floats
    points: Floats
    weight: Floats

    def plus(self, other: Evidence | None) -> Evidence:
        """This with A and b of both."""
        return self if other is None else replace(self, a=self.a + other.a, b=self.b + other.b)

    def misfit(self, beta: Floats) -> float:
        """Root mean square over the points of what coefficients (p,) leave, relative."""
        return _misfit(self.points, self.weight, beta)


def capped(sums: Floats, rows: Floats, *, hidden: bool = False) -> Evidence:
    """Evidence from sums by point over (x, y, l t), (k, p + 2, p + 2), of rows (k,); ``hidden``: prefix hits are."""
    p = sums.shape[1] - 2
    squares = sums[:, p, p]
    seen = (rows > _ROWS_MIN) & (squares > 0.0)
    sums, rows = sums[seen] / squares[seen, None, None], rows[seen]
    if hidden:
        sums[:, PREFILL], sums[:, :, PREFILL] = 0.0, 0.0
    points = sums[:, : p + 1, : p + 1]
    known = rows / (1.0 + rows)
    sigma = max(MISFIT, _misfit(points, known, _own_fit(points, known)))
    weight, means = known / sigma**2, points[:, p, :p]
    c = np.linalg.solve(np.eye(len(weight)) + weight[:, None] * _levels(sums), np.diag(weight))
    a, b = means.T @ c @ means, means.T @ c.sum(axis=1)
    if not hidden:
        a += np.einsum("k,kij->ij", weight, points[:, :p, :p]) - (means.T * weight) @ means
    return Evidence(a, b, points, weight)


def _levels(sums: Floats) -> Floats:
    """K, (k, k), from sums (k, p + 2, p + 2)."""
    steps, time = 0, sums.shape[1] - 1
    weight = np.maximum(sums[:, steps, steps], TINY)
    mean = sums[:, time, steps] / weight
    variance = np.maximum(sums[:, time, time] / weight - mean * mean, 0.0)
    spread = _WANDER_S**2 + variance + variance[:, None]
    levels: Floats = _WANDER**2 * _WANDER_S / np.sqrt(spread) * np.exp(-0.5 * (mean - mean[:, None]) ** 2 / spread)
    return levels


def _misfit(points: Floats, weight: Floats, beta: Floats) -> float:
    signed = np.append(beta, -1.0)
    squares = np.maximum(np.einsum("i,kij,j->k", signed, points, signed), 0.0)
    return float(np.sqrt(squares @ weight / max(float(weight.sum()), TINY)))


def _own_fit(points: Floats, weight: Floats) -> Floats:
    total = np.einsum("k,kij->ij", weight, points)
    none = np.zeros(len(total) - 1, np.bool_)
    return solve(total[:-1, :-1], total[:-1, -1], none, ~none).beta


def evidence_of(learner: RlsLearner, *, hidden: bool = False) -> Evidence | None:
    """What the statistics of a learner of ``portable`` say; None before there are any.

    Phases belong to the stamps of one server: they are taken out at their estimate.
    """
    kept = learner.fit.strata.points
    if kept is None or not kept.rows.any():
        return None
    _, g, rows = kept.visited()
    p, y = len(learner.features), learner.fit.p
    change = np.zeros((p + 2, y + 2))
    change[:p, :p], change[p:, y:] = np.eye(p), np.eye(2)
    change[p, p:y] = -learner.fit.beta[p:y]
    return capped(change @ g @ change.T, rows, hidden=hidden)


def evidence_of_held(held: Design, expected: Floats, variance: Floats, *, hidden: bool = False) -> Evidence:
    """What rows without weights say, weighed against expected coefficients (p,) of covariance (p, p).

    A row's weight is 1 / prediction^2 by Tukey's share. Where that leaves less than 5 % of the rows, what was expected
    is wrong, not they: weights are 1 / y^2 then, by Huber's share.
    """
    p = len(expected)
    x, y = held.x[:, :p].copy(), held.elapsed_us
    if hidden:
        x[:, PREFILL] = 0.0
    prediction = np.maximum(x @ expected, TINY_US)
    spread = np.sqrt(np.einsum("ij,jk,ik->i", x, variance, x)) / prediction
    off = (y - prediction) / (prediction * np.hypot(MISFIT, spread))
    share = np.where(np.abs(off) < BISQUARE, (1.0 - (off / BISQUARE) ** 2) ** 2, 0.0)
    if share.mean() < _ALL_ODD:
        share, prediction = np.minimum(1.0, 1.345 / np.maximum(np.abs(off), 1e-9)), y
    share = np.maximum(share, 1e-6)
    seconds = 1e-9 * (held.end_ns - held.end_ns[0])
    point, labels = np.unique(points_of(np.column_stack([x, y, held.steps])), return_inverse=True)
    z = np.column_stack([x, y, held.steps * seconds])
    sums, rows = np.zeros((len(point), p + 2, p + 2)), np.zeros(len(point))
    np.add.at(sums, labels, np.einsum("n,ni,nj->nij", held.weight * share / prediction**2, z, z))
    np.add.at(rows, labels, held.weight * share)
    return capped(sums, rows, hidden=hidden)
