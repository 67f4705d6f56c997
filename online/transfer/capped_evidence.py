"""What rows say of ``portable``'s coefficients, believed no further than the form is right and the machine steady.

    A = W_s A_s summed over points s       b likewise       W_s = n_s / ((1 + n_s) sigma^2)
    sigma = max(2 %, rms misfit of the rows' own fit over the points)

A_s (4, 4), b_s (4,) are relative sums of operating point s, n_s of its rows and scaled such that y'Wy = n_s: a point is
one observation of the form, however many rows it has. Where the load never let batch and context vary apart, 30,000
rows move the split of their costs by 0.1 % of a step and misfit by 1 to 3 %: without the cap they decide it, surely.

The machine's speed wanders. What is seen at point s is off by a level e_s, y (1 + e_s) = x beta, of a Gaussian process
in time that is N(0, w^2) and forgets as exp(-d^2 / 2 T^2); point s was visited around t_s, give or take d_s, so

    K_rs = cov(e_r, e_s) = w^2 T / S  exp(-(t_r - t_s)^2 / 2 S^2)        S^2 = T^2 + d_r^2 + d_s^2
    A = W_s (A_s - b_s b_s') summed + B' C B     b = B' C 1     C = (diag W^-1 + K)^-1 = (1 + diag W K)^-1 diag W

with the levels integrated out (rows of B are b_s; y'y is 1, so b_s is the mean of a point, A_s - b_s b_s' what its rows
differ by). So minutes tell how costs compare better than what they are, and points that were seen minutes apart do not
tell how their costs compare. w = 5.2 %, T = 30 s: levels of half a minute wander by 5 % in the root mean square over
seven recordings, those of two minutes by 3.7 %.

Where prefill is left out because telemetry hides prefix hits, rows of a point differ by prefill that nobody sees, more
than by batch or context: a server's first prompts are computed, while its batch fills, later ones are found in its
cache. Then the mean of a point alone counts, A = B' C B, and rows are as uncertain as they scatter about the estimate:

    W_s = 1 / (sigma^2 + max(sigma, v_s)^2 / n_s)       v_s^2 = 1 - (b_s beta)^2 / beta' A_s beta

Rows that are still held have no weights of their own yet. They are weighed against what is expected, by Tukey's
bisquare with the variance of the expectation: the first requests of a server pay for cold caches and compilation.
Where telemetry hides prefix hits they keep these weights when they become statistics; elsewhere their own fit's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from online.blocks import Design
from online.rls import OperatingPoints, RlsLearner, RowWeights, points_of, solve
from online.rows import Floats

MISFIT = 0.02
_WANDER, _WANDER_S = 0.052, 30.0
COLUMNS = 4
PREFILL = 1
_BISQUARE = 4.685
_ALL_ODD = 0.05
_ROWS_MIN = 1e-12
"""A point of which less is left says nothing, and 1 / rows may be no number."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A (4, 4), b (4,); by point, sums (k, 5, 5) with y last and y'y = 1, W (k,), n (k,), K (k, k); what drifted."""

    a: Floats
    b: Floats
    points: Floats
    weight: Floats
    rows: Floats
    levels: Floats

    @property
    def tells_prefill(self) -> bool:
        """Whether it says anything of prefill tokens."""
        return bool(self.points[:, COLUMNS, PREFILL].any())

    def misfit(self, beta: Floats) -> float:
        """Root mean square over the points of what coefficients (4,) leave, relative."""
        return _misfit(self.points, self.weight, beta)

    def ratio(self, beta: Floats) -> float:
        """Observed / predicted by coefficients (4,), over the points."""
        predicted = float(self.weight @ self.points[:, COLUMNS, :COLUMNS] @ beta)
        return float(self.weight.sum()) / max(predicted, 1e-300)

    def without_prefill(self) -> Evidence:
        """The same, saying nothing of prefill tokens."""
        a, b, points = self.a.copy(), self.b.copy(), self.points.copy()
        a[PREFILL], a[:, PREFILL], b[PREFILL] = 0.0, 0.0, 0.0
        points[:, PREFILL], points[:, :, PREFILL] = 0.0, 0.0
        return replace(self, a=a, b=b, points=points)

    def by_means(self, beta: Floats) -> Evidence:
        """The same by the means of its points alone, its rows as uncertain as they scatter about coefficients (4,)."""
        means = self.points[:, COLUMNS, :COLUMNS]
        squares = np.einsum("i,kij,j->k", beta, self.points[:, :COLUMNS, :COLUMNS], beta)
        scatter = 1.0 - (means @ beta) ** 2 / np.maximum(squares, 1e-300)
        form = self.rows / (1.0 + self.rows) / self.weight
        a, b = _of_means(means, 1.0 / (form + np.maximum(form, scatter) / self.rows), self.levels)
        return replace(self, a=a, b=b)


def capped(sums: Floats, rows: Floats) -> Evidence:
    """From sums by point over (x, y, l t), (k, 6, 6), and rows (k,)."""
    squares = sums[:, COLUMNS, COLUMNS]
    seen = (rows > _ROWS_MIN) & (squares > 0.0)
    sums, rows = sums[seen] / squares[seen, None, None], rows[seen]
    points = sums[:, : COLUMNS + 1, : COLUMNS + 1]
    known = rows / (1.0 + rows)
    sigma = max(MISFIT, _own_misfit(points, known))
    weight = known / sigma**2
    means, levels = points[:, COLUMNS, :COLUMNS], _levels(sums)
    a, b = _of_means(means, weight, levels)
    a += np.einsum("k,kij->ij", weight, points[:, :COLUMNS, :COLUMNS]) - (means.T * weight) @ means
    return Evidence(a, b, points, weight, rows, levels)


def _of_means(means: Floats, weight: Floats, levels: Floats) -> tuple[Floats, Floats]:
    """B' C B (4, 4) and B' C 1 (4,) by B (k, 4), W (k,) and K (k, k)."""
    told = np.linalg.solve(np.eye(len(weight)) + weight[:, None] * levels, np.diag(weight))
    return means.T @ told @ means, means.T @ told.sum(axis=1)


def _levels(sums: Floats) -> Floats:
    """K by sums (k, 6, 6): covariance of the levels of speed at which points were seen, (k, k)."""
    steps, time = 0, COLUMNS + 1
    weight = np.maximum(sums[:, steps, steps], 1e-300)
    mean = sums[:, time, steps] / weight
    variance = np.maximum(sums[:, time, time] / weight - mean * mean, 0.0)
    spread = _WANDER_S**2 + variance + variance[:, None]
    levels: Floats = _WANDER**2 * _WANDER_S / np.sqrt(spread) * np.exp(-0.5 * (mean - mean[:, None]) ** 2 / spread)
    return levels


def _misfit(points: Floats, weight: Floats, beta: Floats) -> float:
    signed = np.append(beta, -1.0)
    squares = np.maximum(np.einsum("i,kij,j->k", signed, points, signed), 0.0)
    return float(np.sqrt(squares @ weight / max(float(weight.sum()), 1e-300)))


def _own_misfit(points: Floats, weight: Floats) -> float:
    """Of the fit of these points to themselves."""
    total = np.einsum("k,kij->ij", weight, points)
    a, b = total[:COLUMNS, :COLUMNS], total[:COLUMNS, COLUMNS]
    beta = solve(a, b, np.zeros(COLUMNS, np.bool_), np.ones(COLUMNS, np.bool_)).beta
    return _misfit(points, weight, beta)


def evidence_of(learner: RlsLearner) -> Evidence | None:
    """What a learner of ``portable`` has in its statistics; None before there are any."""
    kept = learner.points()
    if kept is None or not len(kept.ids):
        return None
    return capped(_without_phases(kept, learner.members.slow.beta), kept.rows)


def _without_phases(kept: OperatingPoints, beta: Floats) -> Floats:
    """Over (x, y, l t), (k, 6, 6): phases belong to the stamps of a server, and go with their estimate."""
    p = kept.q - 2
    change = np.zeros((COLUMNS + 2, kept.q))
    change[:COLUMNS, :COLUMNS] = np.eye(COLUMNS)
    change[COLUMNS:, p:] = np.eye(2)
    change[COLUMNS, COLUMNS:p] = -beta[COLUMNS:p]
    whole: Floats = change @ kept.matrices() @ change.T
    return whole


def evidence_of_held(held: Design, expected: Floats, variance: Floats) -> Evidence:
    """What rows say that have no weights yet: against expected coefficients (4,) of covariance (4, 4)."""
    x, y = held.x[:, :COLUMNS], held.elapsed_us
    seconds = 1e-9 * (held.end_ns - held.end_ns[0])
    point, labels = np.unique(points_of(np.column_stack([x, y, held.steps])), return_inverse=True)
    z = np.column_stack([x, y, held.steps * seconds])
    weight, share = weights_of_held(held, expected, variance)
    sums, rows = np.zeros((len(point), COLUMNS + 2, COLUMNS + 2)), np.zeros(len(point))
    np.add.at(sums, labels, np.einsum("n,ni,nj->nij", weight, z, z))
    np.add.at(rows, labels, held.weight * share)
    return capped(sums, rows)


def weights_of_held(held: Design, expected: Floats, variance: Floats) -> RowWeights:
    """Weight 1 / prediction^2 by Tukey's share of each row, against expected coefficients of this covariance."""
    x, y = held.x[:, :COLUMNS], held.elapsed_us
    prediction = np.maximum(x @ expected, 1e-9)
    spread = np.sqrt(np.einsum("ij,jk,ik->i", x, variance, x)) / prediction
    off = (y - prediction) / (prediction * np.hypot(MISFIT, spread))
    share = np.where(np.abs(off) < _BISQUARE, (1.0 - (off / _BISQUARE) ** 2) ** 2, 0.0)
    if share.mean() < _ALL_ODD:  # what was expected is wrong, not the rows
        share = np.minimum(1.0, 1.345 / np.maximum(np.abs(off), 1e-9))
        prediction = y
    share = np.maximum(share, 1e-6)
    return RowWeights(held.weight * share / prediction**2, share)
