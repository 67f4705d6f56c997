"""What is minimised, and what is known of a coefficient before the first row.

    minimise over beta, beta_j >= 0 where not free:   beta' (A + H) beta - 2 (b + H beta0)' beta

    A: (p, p) = sum w x x'    b: (p,) = sum w x y    H = diag(h), h: (p,) >= 0    beta0: (p,) the prior's mean

H is added at every solve and is not part of A, so it cannot be forgotten: this makes wind-up impossible. A ridge of
1e-6 on the scaled diagonal bounds the condition number by p * 1e6. Columns without data and without a prior take no
part and get 0. The active set is found by block principal pivoting, with Murty's rule as the backup; it starts from the
last solve's, which is right in all but a few blocks.

A donor is another configuration's learner with the same columns; its coefficients are the mean, and

    sd_j = 15 % of beta_j + 2 % of ybar / rms x_j        20 precise rows then do what 500 do from cold
    H_jj = (max(min(s, 3 %), misfit) / sd_j)^2           s: the noise of the rows

Residuals are large because the machine is noisy or because the donor is wrong. Unbounded, a wrong donor would weigh
more the worse it fits; so s counts to 3 %. A donor that rows contradict is dropped (:func:`contradicted`).

References: Kim and Park, Fast nonnegative matrix factorization: an active-set-like method (SIAM J. Sci. Comput. 2011);
Murty, Note on a Bard-type scheme (Opsearch 1974).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from online.constants import DONOR_SHARE
from online.rows import Floats, Mask
from online.state import StateError, Tree, fitted_array

# Guard: bounds the condition number by p * 1e6.
RELATIVE_RIDGE = 1e-6
# Guard: rounding of gradients; below ``NOTHING`` scaling would overflow.
_TOLERANCE, NOTHING = 1e-10, 1e-280
# Source: Kim and Park; three, then Murty's rule.
_FULL_EXCHANGES = 3
# Guess: of a step, how far a donor's column may be off; noise beyond the second is taken for the donor's misfit.
_DONOR_FLOOR, _SCALE_MAX = 0.02, 0.03
# Guess: a donor is dropped where the own fit is twice as good, and better by 5 %.
_WORSE, _MORE = 2.0, 0.05


@dataclass(frozen=True, slots=True)
class Solution:
    """beta (p,), the passive set it rests on (p,), and which columns had anything to say (p,)."""

    beta: Floats
    passive: Mask
    live: Mask


def solve(
    a: Floats,
    b: Floats,
    free: Mask,
    warm: Mask,
    *,
    prior_precision: Floats | None = None,
    prior_mean: Floats | None = None,
) -> Solution:
    """Minimise the quadratic above; ``free`` columns may be negative, ``warm`` is the last passive set."""
    diagonal, right = a.diagonal(), b
    if prior_precision is not None:
        diagonal = diagonal + prior_precision
        right = b if prior_mean is None else b + prior_precision * prior_mean
    live = diagonal > NOTHING
    if not live.all():
        beta, passive, on = np.zeros(len(b)), np.zeros(len(b), np.bool_), live.nonzero()[0]
        if len(on):
            inside = (a + np.diag(diagonal - a.diagonal()))[on[:, None], on]
            part = solve(inside, right[on], free[on], warm[on])
            beta[on], passive[on] = part.beta, part.passive
        return Solution(beta, passive, live)
    scale = 1.0 / np.sqrt(diagonal)
    c = a * scale
    c *= scale[:, None]
    c.flat[:: len(b) + 1] = 1.0 + RELATIVE_RIDGE  # the prior adds to the diagonal only, which is 1 after scaling
    passive = warm | free
    z, passive = _pivot(c, right * scale, free, passive if passive.any() else live)
    return Solution(z * scale, passive, live)


def _pivot(c: Floats, rhs: Floats, free: Mask, passive: Mask) -> tuple[Floats, Mask]:
    p = len(rhs)
    z: Floats = np.zeros(p)
    if passive.all():
        z = np.asarray(np.linalg.solve(c, rhs), np.float64)
        if ((z >= 0.0) | free).all():
            return z, passive
    best, backup = p + 1, _FULL_EXCHANGES
    tolerance = -_TOLERANCE * float(np.abs(rhs).max(initial=0.0))
    for _ in range(8 * p + 8):
        on = passive.nonzero()[0]
        z = np.zeros(p)
        if len(on):
            z[on] = np.linalg.solve(c[on[:, None], on], rhs[on])
        wrong = np.where(passive, (z < 0.0) & ~free, c @ z - rhs < tolerance)
        count = int(np.count_nonzero(wrong))
        if count == 0:
            return z, passive
        backup = _FULL_EXCHANGES if count < best else backup - 1
        best = min(best, count)
        if backup < 0:
            wrong[: int(wrong.nonzero()[0][-1])] = False
        passive = passive ^ wrong
    return np.where(free, z, np.maximum(z, 0.0)), passive


# ------------------------------------------------------------------- priors


def contradicted(misfit: float, own: float) -> bool:
    """Whether rows contradict what is believed: it misfits them twice as much as their own fit, and by 5 % more.

    Relative errors, of the estimate that believes it and of the fit of the rows alone.
    """
    return misfit > max(_WORSE * own, own + _MORE)


@dataclass(frozen=True, slots=True)
class Prior:
    """Mean and standard deviation of each coefficient and phase, (p,); infinite = nothing known.

    ``misfit`` is a relative error below which a few rows are not believed against the prior: neighbouring rows err
    together, and a hundred of them know less than a hundred independent ones.
    """

    mean: Floats
    sd: Floats
    misfit: float = 0.0

    @staticmethod
    def of_donor(beta: Floats, per_row: Floats) -> Prior:
        """From a donor's beta (p,) and its A_jj per effective row (p,)."""
        floor = _DONOR_FLOOR / np.sqrt(np.maximum(per_row, NOTHING))
        return Prior(beta, np.where(per_row > 0.0, DONOR_SHARE * np.abs(beta) + floor, np.inf))

    def sized(self, p: int) -> Prior:
        """Of p columns: phases that are not learned are left out, phases that are new are not known."""
        more = max(0, p - len(self.mean))
        mean = np.concatenate([self.mean, np.zeros(more)])[:p]
        return Prior(mean, np.concatenate([self.sd, np.full(more, np.inf)])[:p], self.misfit)

    def precision(self, scale: float) -> Floats:
        """H's diagonal for noise of this relative scale, (p,)."""
        return (self._noise(scale) / self.sd) ** 2

    def score_variance(self, scale: float) -> Floats:
        """Variance of what the prior adds to the scores, H (mean - beta), (p,): H^2 sd^2."""
        return self._noise(scale) ** 2 * self.precision(scale)

    def _noise(self, scale: float) -> float:
        return max(min(scale, _SCALE_MAX), self.misfit)

    def to_state(self) -> Tree:
        """For the state file, in which a deviation of 0 stands for an infinite one."""
        sd = np.where(np.isinf(self.sd), 0.0, self.sd)
        return {"mean": self.mean, "sd": sd, "misfit": float(self.misfit)}

    @staticmethod
    def of_state(state: Tree) -> Prior:
        """From the state file; StateError if it does not fit."""
        mean, sd = (fitted_array(state[name], np.empty(0)) for name in ("mean", "sd"))
        misfit = state["misfit"]
        if mean.shape != sd.shape or not (sd >= 0.0).all() or not 0.0 <= misfit < math.inf:
            raise StateError(f"a prior of {len(mean)} columns: deviations or misfit below 0")
        return Prior(mean, np.where(sd > 0.0, sd, np.inf), misfit)
