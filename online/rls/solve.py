"""What is minimised, and what is known of a coefficient before the first row.

    minimise over beta, beta_j >= 0 where not free:   beta' (A + H) beta - 2 (b + H beta0)' beta

    A: (p, p) = sum w x x'    b: (p,) = sum w x y    H = diag(h), h: (p,) >= 0    beta0: (p,) the prior's mean

H is added at every solve and is not part of A, so it cannot be forgotten: this makes wind-up impossible. A ridge of
1e-6 on the scaled diagonal bounds the condition number by p * 1e6. Columns without data and without a prior take no
part and get 0. From all columns on, one after another is held at 0 or let go again, the last that is wrong first,
until none is (Murty's rule).

A donor is another configuration's learner with the same columns; its coefficients are the mean, and

    sd_j = 15 % of beta_j + 2 % / rms (x_j / yhat)       20 precise rows then do what 500 do from cold
    H_jj = (max(min(s, 2 %), misfit) / sd_j)^2           s: the noise of the rows

Residuals are large because the machine is noisy or because the donor is wrong. Unbounded, a wrong donor would weigh
more the worse it fits; so s counts to 2 %. A donor that rows contradict is dropped (:func:`is_contradicted`).

Reference: Murty, Note on a Bard-type scheme for solving the complementarity problem (Opsearch 1974).

**Weights of rows.** Huber's, relative to the prediction; and the first fit, which has no prediction yet.

    f = max(clip(yhat, y/2, 2y), 0.2 m l)          m: running median of y per step
    u = (y - yhat) sqrt(weight l) / f              relative residual of one step (rows that overlap have weight < 1:
                                                   this one tells of weight l steps alone)
    h = min(1, 2.5 / (|u| / s))                    Huber's share, 1 for a normal row
    w = weight l / f^2 h min(1, 50 g / yhat)^2     g: f or the mean, the larger (RlsLearner._weigh)

f is clipped because plain 1 / yhat^2 runs away: a huge yhat makes its own misfit look small. The last factor bounds
what one row does: else a step of 10 ms that is told to have had 2^30 tokens takes their coefficient away. The floor
keeps a tiny y from owning the fit. The scale s moves toward 1.4826 median |u| of each block by a bounded factor.

A mean fit (of times that are skewed and add up, where a robust fit is far off) has w = weight / m^2 and h = 1, with m
that of the first rows: least squares, whose residuals sum to zero.

The first 256 rows are fitted together: passes with Tukey's weights from a start at 1 / y^2, which drop what is beyond
4.7 scales. A warm-up that is 20 % of the rows and all of one batch size is out of Huber's reach but not of Tukey's.

References: Huber, Robust Statistics (1981), 7.8; Holland and Welsch (Comm. Stat. 1977), for the passes.

**Which columns matter.** Automatic relevance determination on the same decayed statistics, for ``bsr_ard``.

Each coefficient has a zero-mean normal prior of its own precision alpha_j. The evidence of the rows decides alpha_j,
and columns that do not matter are pruned. With H = s^2 diag(alpha) (s: relative noise scale), on the columns in use

    C = (A + H)^-1                  posterior covariance = s^2 C, mean = C b
    S_j = (A_jj - A_j C A_j') / s^2        Q_j = (b_j - A_j C b) / s^2       s_j, q_j: the same without column j
    alpha_j = s_j^2 / (q_j^2 - s_j)  where q_j^2 > s_j,  else the column is pruned (alpha_j = infinite)

Each solve starts from the columns that are always in use, intercept and phases, and makes the change that raises the
evidence most until none does. A donor's prior is a few rows more: A + K and b + K m stand for A and b, K its precision
and m its mean. So a relevance pulls to 0, never to m, and what a donor thinks relevant is pruned once the rows say
otherwise.

Reference: Tipping and Faul, Fast marginal likelihood maximisation for sparse Bayesian models (AISTATS 2003).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from online.blocks import median_of
from online.constants import (
    DONOR_SHARE,
    LACK_OF_FIT,
    MAD_TO_SD,
    MEMORY_ROWS,
    NOISE_ROWS,
    QUIETEST,
    TINY,
    VALUE_MAX,
    WORTH,
)
from online.rows import PHASES, Floats, Ints, Mask
from online.state import StateError, Tree, fitted_array

# Guard: bounds the condition number by p * 1e6.
RELATIVE_RIDGE = 1e-6
# Guard: rounding of gradients and of differences that are above 0.
_TOLERANCE = 1e-10
# Guard: exchanges of columns end by themselves, in two for each column or so, but rounding may turn them in a circle.
_EXCHANGES_MAX = 1000


@dataclass(frozen=True, slots=True)
class Solution:
    """beta (p,), the passive set it rests on (p,), and the mask of columns with data or a prior (p,)."""

    beta: Floats
    passive: Mask
    live: Mask


def solve(
    a: Floats,
    b: Floats,
    free: Mask | None = None,
    *,
    prior_precision: Floats | float = 0.0,
    prior_mean: Floats | float = 0.0,
) -> Solution:
    """Minimise the quadratic above; ``free`` columns (p,) may be negative, by default none."""
    diagonal, right = a.diagonal() + prior_precision, b + prior_precision * prior_mean
    live = diagonal > TINY
    on, beta, passive = live.nonzero()[0], np.zeros(len(b)), live.copy()
    scale = 1.0 / np.sqrt(diagonal[on])
    c = a[on[:, None], on] * scale
    c *= scale[:, None]
    c.flat[:: len(on) + 1] = 1.0 + RELATIVE_RIDGE  # the prior adds to the diagonal only, which is 1 after scaling
    z, passive[on] = _pivot(c, right[on] * scale, np.zeros(len(on), np.bool_) if free is None else free[on])
    beta[on] = z * scale
    return Solution(beta, passive, live)


def _pivot(c: Floats, rhs: Floats, free: Mask) -> tuple[Floats, Mask]:
    """Z of the scaled system, and its passive set."""
    passive: Mask = np.ones(len(rhs), np.bool_)
    tolerance = -_TOLERANCE * float(np.abs(rhs).max(initial=0.0))
    for _ in range(_EXCHANGES_MAX):
        on, z = passive.nonzero()[0], np.zeros(len(rhs))
        z[on] = np.linalg.solve(c[on[:, None], on], rhs[on])
        wrong = np.where(passive, (z < 0.0) & ~free, c @ z - rhs < tolerance)
        if not wrong.any():
            return z, passive
        passive[wrong.nonzero()[0][-1]] ^= True
    return np.where(free, z, np.maximum(z, 0.0)), passive


# ------------------------------------------------------------------- priors


def is_contradicted(lack_of_fit: float, own: float) -> bool:
    """Whether rows contradict a prior: with it the error is twice that of their own fit, and 5 % more.

    Both errors are relative: ``lack_of_fit`` of the estimate with the prior, ``own`` of the fit to the rows alone.
    """
    return lack_of_fit > max(2.0 * own, own + WORTH)


@dataclass(frozen=True, slots=True)
class Prior:
    """Mean and standard deviation of each coefficient, (p,); infinite = nothing known.

    ``lack_of_fit`` is a relative error below which a few rows are not believed against the prior: neighbouring rows err
    together, and a hundred of them know less than a hundred independent ones.
    """

    mean: Floats
    sd: Floats
    lack_of_fit: float = 0.0

    @staticmethod
    def of_donor(beta: Floats, per_row: Floats) -> Prior:
        """From a donor's beta (p,) and its A_jj per effective row (p,)."""
        floor = LACK_OF_FIT / np.sqrt(np.maximum(per_row, TINY))
        return Prior(beta, np.where(per_row > 0.0, DONOR_SHARE * np.abs(beta) + floor, np.inf))

    def with_phases(self) -> Prior:
        """Append phases, of which nothing is known: they belong to the stamps of one server."""
        more = len(PHASES)
        return Prior(np.append(self.mean, np.zeros(more)), np.append(self.sd, np.full(more, np.inf)), self.lack_of_fit)

    def precision(self, scale: float) -> Floats:
        """Diagonal of H, (p,): the precision of each coefficient in units of the residual scale."""
        return (self._noise(scale) / self.sd) ** 2

    def score_variance(self, scale: float) -> Floats:
        """Variance of what the prior adds to the scores, H (mean - beta), (p,): H^2 sd^2."""
        return self._noise(scale) ** 2 * self.precision(scale)

    def _noise(self, scale: float) -> float:
        return max(min(scale, LACK_OF_FIT), self.lack_of_fit)

    def to_state(self) -> Tree:
        """For the state file, in which a deviation of 0 stands for an infinite one."""
        sd = np.where(np.isinf(self.sd), 0.0, self.sd)
        return {"mean": self.mean, "sd": sd, "misfit": float(self.lack_of_fit)}

    @staticmethod
    def of_state(state: Tree) -> Prior:
        """From the state file; StateError if it does not fit."""
        mean, sd = (fitted_array(state[name], np.empty(0)) for name in ("mean", "sd"))
        lack_of_fit = state["misfit"]
        if mean.shape != sd.shape or not (sd >= 0.0).all() or not 0.0 <= lack_of_fit < math.inf:
            raise StateError(f"a prior of {len(mean)} columns: deviations or misfit below 0")
        return Prior(mean, np.where(sd > 0.0, sd, np.inf), lack_of_fit)


# ------------------------------------------------------------------- weights of rows

# Guess: cut in scales; Huber's own 1.345 is the one for 95 % efficiency.
HUBER = 2.5
# Guard: a tiny y does not own the fit. With 5 % no error of a step moves; of waits in a queue, most of which are next
# to nothing, the robust fit would leave out even more (mean_factor 753 in place of 446 on c10_long).
_FLOOR = 0.2
# Guess: share of the way that the scale goes in one block of 32 rows.
_SCALE_RATE = 0.15
# Guess: passes after which the first fit stands; 6 leave the same errors.
_PASSES = 9


def relative_residuals(
    y: Floats, steps: Floats | Ints, weight: Floats, prediction: Floats, m: float
) -> tuple[Floats, Floats]:
    """U and sqrt(weight l) / f of rows of so many steps and weights against their predictions, (n,) each."""
    f = np.maximum(np.minimum(np.maximum(prediction, 0.5 * y), 2.0 * y), _FLOOR * m * steps)
    root = np.sqrt(steps * weight) / f
    return (y - prediction) * root, root


def huber(u: Floats, scale: float) -> Floats:
    """Huber's h of relative residuals (n,)."""
    h: Floats = HUBER / np.maximum(np.abs(u) / scale, HUBER)
    return h


def bisquare(z: Floats) -> Floats:
    """Tukey's weights of normalised residuals z: 0 beyond 4.685, where Huber's are above 0.

    That cut has 95 % efficiency at the normal (Holland and Welsch).
    """
    inside: Floats = np.maximum(0.0, 1.0 - (z / 4.685) ** 2)
    return inside * inside


def update_scale(scale: float, u: Floats) -> float:
    """The running scale after a block of relative residuals (n,)."""
    share = _SCALE_RATE * min(1.0, len(u) / NOISE_ROWS)
    spread = max(MAD_TO_SD * _middle(np.abs(u)), QUIETEST)
    return float(scale * min(max(spread / scale, 0.5), 2.0) ** share)


def update_median(median_us: float, per_step_us: Floats) -> float:
    """The running median after a block of times per step (n,)."""
    return median_us + min(1.0, len(per_step_us) / MEMORY_ROWS) * (_middle(per_step_us) - median_us)


def _middle(values: Floats) -> float:
    """Upper median, (n,)."""
    half = len(values) // 2
    return float(np.partition(values, half)[half])


def weigh_first_rows(
    z: Floats, row_weight: Floats, solve_statistics: Callable[[Floats, float], Floats], *, robust: bool
) -> tuple[Floats, Floats, float, float]:
    """Final weights and shares, (n,) each, the scale and m of rows z (n, q) of such weights (n,), by reweighted passes.

    y is column -2 and l column -1. ``solve_statistics`` gives beta (p,) for z'Wz (q, q) and the scale; the caller keeps
    the last one. Not ``robust``: least squares with constant weights (a mean fit).
    """
    x, y, steps = z[:, :-2], z[:, -2], z[:, -1]
    median_us, scale = median_of(y / steps), LACK_OF_FIT
    per_unit, u = np.sqrt(row_weight) / median_us, np.zeros(len(z))
    if robust:
        u, per_unit = relative_residuals(y, steps, row_weight, y, median_us)
    for _ in range(_PASSES if robust else 1):
        share = bisquare(u / scale)
        weight = share * per_unit * per_unit
        prediction = x @ solve_statistics((z * weight[:, None]).T @ z, scale)
        u, per_unit = relative_residuals(y, steps, row_weight, prediction, median_us)
        scale = max(QUIETEST, MAD_TO_SD * median_of(np.abs(u)))
    return weight, share, scale, median_us


# ------------------------------------------------------------------- which columns matter

# Guess: the log evidence below which a change is not worth making.
_LEAST_GAIN = 1e-3


def relevance(a: Floats, b: Floats, variance: float, always: Mask, free: Mask) -> tuple[Floats, Mask]:
    """The relevance of p columns as a prior's precision, (p,), and which are pruned, (p,).

    ``a``, ``b``: A + K and b + K m. ``variance``: s^2. ``always``: which are always in use. ``free``: may be negative.
    """
    alpha = np.where(always, 0.0, -1.0)  # in 1 / us^2 of the coefficient; negative: pruned
    for _ in range(_EXCHANGES_MAX):
        s, q = _without_each(a, b, variance, alpha)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            # A column that can only enter with the wrong sign is not relevant: coefficients are non-negative.
            relevant = (q * q > s) & (s > 0.0) & ((q > 0.0) | free)
            wanted = np.where(relevant, s * s / (q * q - s), -1.0)
            gain = _evidence(wanted, s, q) - _evidence(alpha, s, q)
        gain[always] = 0.0
        best = int(np.argmax(np.nan_to_num(gain)))
        if not gain[best] > _LEAST_GAIN:
            break
        alpha[best] = wanted[best]
    pruned = alpha < 0.0  # a precision that stands for an infinite one: coefficient 0 for every purpose
    return np.where(pruned, VALUE_MAX * np.maximum(a.diagonal(), TINY), variance * alpha), pruned


def _without_each(a: Floats, b: Floats, variance: float, alpha: Floats) -> tuple[Floats, Floats]:
    """s_j and q_j of the module's equations, (p,) each."""
    diagonal = a.diagonal()
    on = (alpha >= 0.0) & (diagonal > 0.0)
    system = (a + np.diag(np.where(on, variance * alpha, 0.0) + RELATIVE_RIDGE * diagonal))[np.ix_(on, on)]
    scale = 1.0 / np.sqrt(np.maximum(system.diagonal(), TINY))
    inverse = np.linalg.inv(system * scale * scale[:, None]) * scale * scale[:, None]
    cross = a[:, on]
    s = (diagonal - np.einsum("ij,jk,ik->i", cross, inverse, cross)) / variance
    q = (b - cross @ (inverse @ b[on])) / variance
    used = np.where(alpha > 0.0, alpha, 1.0)
    factor = np.where(alpha > 0.0, used / np.maximum(used - s, _TOLERANCE * used), 1.0)
    return factor * s, factor * q


def _evidence(alpha: Floats, s: Floats, q: Floats) -> Floats:
    """Contribution of columns with precision alpha to the log evidence, against leaving them out: 0 of the pruned."""
    value = 0.5 * (np.log(np.maximum(alpha, TINY) / (alpha + s)) + q * q / (alpha + s))
    return np.asarray(np.where(alpha > 0.0, value, 0.0))
