"""Priors: what is known of a coefficient before the first row.

A donor is another configuration's learner with the same columns. Its coefficients become the mean of the prior and

    tau_j = 15 % of beta_j + 2 % of ybar / rms x_j

its standard deviation: with precise rows 20 observations then do what 500 do from cold. The second term lets a
coefficient that was 0 at the donor become something.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from online.rows import Floats
from online.state import Array, Finite, StateError, saved

_F8 = np.dtype(np.float64)
_SHARE, _FLOOR, _TINY = 0.15, 0.02, 1e-150


@dataclass(frozen=True, slots=True)
class Prior:
    """Mean and standard deviation of each coefficient and phase, (p,); infinite = nothing known.

    ``misfit`` is a relative error below which a few rows are not believed against the prior: neighbouring rows err
    together (clock wander, one batch size), and a hundred of them know less than a hundred independent ones.
    """

    STATE = saved("prior", mean=Array(_F8), sd=Array(_F8, nan=True), misfit=Finite)

    mean: Floats
    sd: Floats
    misfit: float = 0.0

    @staticmethod
    def of_donor(beta: Floats, per_row: Floats, gain: float = 1.0) -> Prior:
        """From a donor's beta (p,) and its A_jj per effective row (p,)."""
        known = per_row > 0.0
        sd = _SHARE * np.abs(beta) + _FLOOR / np.sqrt(np.maximum(per_row, _TINY))
        return Prior(gain * beta, np.where(known, gain * sd, np.inf))

    def sized(self, p: int) -> Prior:
        """Of p columns: phases that are not learned are left out, phases that are new are not known."""
        more = max(0, p - len(self.mean))
        mean = np.concatenate([self.mean, np.zeros(more)])[:p]
        return Prior(mean, np.concatenate([self.sd, np.full(more, np.inf)])[:p], self.misfit)

    def restored(self) -> None:
        """Every column has a mean and a deviation, which may be infinite."""
        if self.mean.shape != self.sd.shape or not (self.sd > 0.0).all():
            raise StateError(f"expected {len(self.mean)} deviations above 0")

    def precision(self, scale: float) -> Floats:
        """H's diagonal for noise of this relative scale, (p,)."""
        return (max(scale, self.misfit) / self.sd) ** 2

    def score_variance(self, scale: float) -> Floats:
        """Variance of what the prior adds to the scores, H (mean - beta), (p,): H^2 sd^2."""
        return max(scale, self.misfit) ** 2 * self.precision(scale)
