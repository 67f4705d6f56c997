"""What rows say of ``portable``'s coefficients, believed no further than the form is right.

    A = sum over points s of A_s / (n_s v_s)       b likewise       v_s = sigma^2 + s^2 / n_s
    sigma = max(2 %, rms misfit of the rows' own fit over the points)      s = max(2 %, scale of single rows)

A_s (4, 4), b_s (4,) are relative sums of operating point s, n_s of its rows and scaled such that y'Wy = n_s: a point is
one observation of the form, however many rows it has. Where the load never let batch and context vary apart, 30,000
rows move the split of their costs by 0.1 % of a step and misfit by 1 to 3 %: without the cap they decide it, surely.

Rows that are still held have no weights of their own yet. They are weighed against what is expected, by Tukey's
bisquare with the variance of the expectation: the first requests of a server pay for cold caches and compilation.

A point is not stationary where the same work takes 3 sigma longer at its end than at its beginning:

    tau = minimise over (beta, tau)  sum w (y - x beta - l t tau)^2       |tau| sqrt(12) sd(t) > 3 * 2 % of the step

Such a configuration has a cost that no column sees; it is said, and it is not lent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from online.blocks import Design
from online.rls import OperatingPoints, RlsLearner, point_name, points_of, solve
from online.rows import Floats

MISFIT = 0.02
COLUMNS = 4
_PREFILL = 1
_BISQUARE = 4.685
_ALL_ODD = 0.05
_DRIFTS = 3.0 * MISFIT
_DRIFT_ROWS, _DRIFT_SURE = 64.0, 5.0
_RIDGE = 1e-9


@dataclass(frozen=True, slots=True)
class Evidence:
    """A (4, 4) and b (4,) ; by point, sums (k, 5, 5) with y last and y'Wy = 1, their weight; what drifted."""

    a: Floats
    b: Floats
    points: Floats
    weight: Floats
    unsteady: tuple[str, ...] = ()

    def misfit(self, beta: Floats) -> float:
        """Root mean square over the points of what coefficients (4,) leave, relative."""
        return _misfit(self.points, self.weight, beta)

    def without_prefill(self) -> Evidence:
        """The same, saying nothing of prefill tokens."""
        a, b, points = self.a.copy(), self.b.copy(), self.points.copy()
        a[_PREFILL], a[:, _PREFILL], b[_PREFILL] = 0.0, 0.0, 0.0
        points[:, _PREFILL], points[:, :, _PREFILL] = 0.0, 0.0
        return Evidence(a, b, points, self.weight, self.unsteady)

    def plus(self, other: Evidence) -> Evidence:
        """Both."""
        points, weight = np.concatenate([self.points, other.points]), np.concatenate([self.weight, other.weight])
        return Evidence(self.a + other.a, self.b + other.b, points, weight, self.unsteady)


def capped(sums: Floats, rows: Floats, scale: float, unsteady: tuple[str, ...] = ()) -> Evidence:
    """From sums by point (k, 5, 5) with y last, and rows (k,), whose scale is that of single rows."""
    squares = sums[:, COLUMNS, COLUMNS]
    seen = (rows > 0.0) & (squares > 0.0)
    points, rows = sums[seen] / squares[seen, None, None], rows[seen]
    noise = max(MISFIT, scale) ** 2 / rows
    sigma = max(MISFIT, _own_misfit(points, 1.0 / (MISFIT**2 + noise)))
    weight = 1.0 / (sigma**2 + noise)
    weighed = np.einsum("k,kij->ij", weight, points)
    return Evidence(weighed[:COLUMNS, :COLUMNS], weighed[:COLUMNS, COLUMNS], points, weight, unsteady)


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
    whole = _without_phases(kept, learner.members.slow.beta)
    names = tuple(point_name(int(point)) for point in np.sort(kept.ids[_unsteady(whole, kept.rows)]))
    sums = whole[:, : COLUMNS + 1, : COLUMNS + 1]
    return capped(sums, kept.rows, learner.members.weighing.slow_scale, names)


def _without_phases(kept: OperatingPoints, beta: Floats) -> Floats:
    """Over (x, y, l t), (k, 6, 6): phases belong to the stamps of a server, and go with their estimate."""
    p = kept.q - 2
    change = np.zeros((COLUMNS + 2, kept.q))
    change[:COLUMNS, :COLUMNS] = np.eye(COLUMNS)
    change[COLUMNS:, p:] = np.eye(2)
    change[COLUMNS, COLUMNS:p] = -beta[COLUMNS:p]
    whole: Floats = change @ kept.matrices() @ change.T
    return whole


def _unsteady(whole: Floats, rows: Floats) -> list[bool]:
    """Points where the same work takes longer than it did, or shorter."""
    return [bool(n >= _DRIFT_ROWS) and _drifts(one, float(n)) for one, n in zip(whole, rows, strict=True)]


def _drifts(g: Floats, rows: float) -> bool:
    used = [j for j in range(COLUMNS) if g[j, j] > 0.0]
    steps, y, time = 0, COLUMNS, COLUMNS + 1
    if g[steps, steps] <= 0.0 or g[time, time] <= 0.0:
        return False
    columns = [*used, time]
    scale = 1.0 / np.sqrt(g[columns, columns])
    system = g[np.ix_(columns, columns)] * scale * scale[:, None] + _RIDGE * np.eye(len(columns))
    inverse = np.linalg.inv(system)
    slopes = inverse @ (g[columns, y] * scale)
    left = max(float(g[y, y] - slopes @ (g[columns, y] * scale)), 0.0) / rows
    slope = slopes[-1] * scale[-1]
    mean = g[steps, time] / g[steps, steps]
    spread = np.sqrt(max(g[time, time] / g[steps, steps] - mean * mean, 0.0))
    step = g[y, steps] / g[steps, steps]
    drift = abs(slope) * np.sqrt(12.0) * spread / max(step, 1e-300)
    error = np.sqrt(left * inverse[-1, -1]) * scale[-1]
    return bool(drift > _DRIFTS and abs(slope) > _DRIFT_SURE * error)


def evidence_of_held(held: Design, expected: Floats, variance: Floats) -> Evidence:
    """What rows say that have no weights yet: against expected coefficients (4,) of covariance (4, 4)."""
    x, y = held.x[:, :COLUMNS], held.elapsed_us
    point, labels = np.unique(points_of(np.column_stack([x, y, held.steps])), return_inverse=True)
    z = np.column_stack([x, y])
    prediction = np.maximum(x @ expected, 1e-9)
    spread = np.sqrt(np.einsum("ij,jk,ik->i", x, variance, x)) / prediction
    off = (y - prediction) / (prediction * np.hypot(MISFIT, spread))
    share = np.where(np.abs(off) < _BISQUARE, (1.0 - (off / _BISQUARE) ** 2) ** 2, 0.0)
    if share.mean() < _ALL_ODD:  # what was expected is wrong, not the rows
        share = np.minimum(1.0, 1.345 / np.maximum(np.abs(off), 1e-9))
        prediction = y
    counted = held.weight * np.maximum(share, 1e-6)
    sums, rows = np.zeros((len(point), COLUMNS + 1, COLUMNS + 1)), np.zeros(len(point))
    np.add.at(sums, labels, np.einsum("n,ni,nj->nij", counted / prediction**2, z, z))
    np.add.at(rows, labels, counted)
    return capped(sums, rows, MISFIT)
