"""Priors: what is known of a coefficient before the first row.

A donor is another configuration's learner with the same columns. Its coefficients become the mean of the prior and

    tau_j = 15 % of beta_j + 2 % of ybar / rms x_j

its standard deviation: with precise rows 20 observations then do what 500 do from cold. The second term lets a
coefficient that was 0 at the donor become something.

    H_jj = (max(min(s, 3 %), misfit) / sd_j)^2                  what a solve adds to A_jj for the prior: s, the noise

Residuals are large either because the machine is noisy or because the donor is wrong. Unbounded, a wrong donor would
weigh more the worse it fits, and its own misfit would keep it in force for thousands of rows; so s counts to 3 %. By
the floor of tau a donor then says of a column no more than (3 % / 2 %)^2 = 2.25 rows of its own load do.
A donor that rows contradict (:func:`contradicted`) is no longer believed at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from online.constants import DONOR_SHARE
from online.rows import Floats
from online.state import StateError, Tree, fitted_array

# Guess: of a step. Guard: 1e-150 has a square above 0.
_FLOOR, _TINY = 0.02, 1e-150
# Guess: noise beyond is taken for the donor's misfit.
_SCALE_MAX = 0.03
# Guess: a donor is dropped where the own fit is twice as good, and better by 5 %.
_WORSE, MORE = 2.0, 0.05


def contradicted(misfit: float, own: float, more: float = MORE) -> bool:
    """Whether rows contradict what is believed: it misfits them twice as much as their own fit, and by ``more``.

    Relative errors, of the estimate that believes it and of the fit of the rows alone.
    """
    return misfit > max(_WORSE * own, own + more)


@dataclass(frozen=True, slots=True)
class Prior:
    """Mean and standard deviation of each coefficient and phase, (p,); infinite = nothing known.

    ``misfit`` is a relative error below which a few rows are not believed against the prior: neighbouring rows err
    together (clock wander, one batch size), and a hundred of them know less than a hundred independent ones.
    """

    mean: Floats
    sd: Floats
    misfit: float = 0.0

    @staticmethod
    def of_donor(beta: Floats, per_row: Floats, gain: float = 1.0) -> Prior:
        """From a donor's beta (p,) and its A_jj per effective row (p,)."""
        known = per_row > 0.0
        sd = DONOR_SHARE * np.abs(beta) + _FLOOR / np.sqrt(np.maximum(per_row, _TINY))
        return Prior(gain * beta, np.where(known, gain * sd, np.inf))

    def sized(self, p: int) -> Prior:
        """Of p columns: phases that are not learned are left out, phases that are new are not known."""
        more = max(0, p - len(self.mean))
        mean = np.concatenate([self.mean, np.zeros(more)])[:p]
        return Prior(mean, np.concatenate([self.sd, np.full(more, np.inf)])[:p], self.misfit)

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

    def precision(self, scale: float) -> Floats:
        """H's diagonal for noise of this relative scale, (p,)."""
        return (self._noise(scale) / self.sd) ** 2

    def score_variance(self, scale: float) -> Floats:
        """Variance of what the prior adds to the scores, H (mean - beta), (p,): H^2 sd^2."""
        return self._noise(scale) ** 2 * self.precision(scale)

    def _noise(self, scale: float) -> float:
        return max(min(scale, _SCALE_MAX), self.misfit)
