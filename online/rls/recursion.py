"""Textbook recursive least squares with exponential forgetting: the tested reference, learner ``rls_covariance``.

    k     = P x / (lam + x' P x)          P: (p, p) symmetric positive definite, k: (p,)
    theta = theta + k (y - x' theta)      theta: (p,)
    P     = (P - k x' P) / lam

Guarantee: with lam = 1 and P0 = I / r, theta equals ridge regression with penalty r on all rows seen
(tests/property/test_rls.py::test_equals_ridge_in_batch, relative error < 1e-8).

It is here because everybody knows it and every other learner is measured against it. It is not the default because
with lam < 1 and rows that do not excite every direction P grows without bound ("wind-up"). The guards that make it
safe to run anyway, and that do nothing in the case of the guarantee: P is made symmetric after every row; where
trace(P) exceeds ``trace_max`` times its first value the forgetting of that row is undone. Reference: Ljung, System
Identification (1999), 11.2; Astrom and Wittenmark, Adaptive Control (1995), 2.2 and 11.5.
"""

from __future__ import annotations

import numpy as np

from online.rows import Floats
from online.state import Count, saved


class CovarianceRLS:
    """The recursion over rows of p features.

    Args:
        p: number of features.
        ridge: r > 0, the penalty whose inverse is the first P; a scalar or one per feature, shape (p,).
        forgetting: lam in (0, 1]; 1 forgets nothing.
        trace_max: bound of trace(P), as a multiple of its first value.
    """

    STATE = saved("recursion", theta=Floats, covariance=Floats, rows=Count)

    __slots__ = ("_cap", "covariance", "forgetting", "rows", "theta")

    def __init__(self, p: int, ridge: float | Floats = 1e-6, forgetting: float = 1.0, trace_max: float = 1e6) -> None:
        penalty = np.broadcast_to(np.asarray(ridge, np.float64), (p,))
        if not 0.0 < forgetting <= 1.0:
            raise ValueError(f"forgetting must be in (0, 1], got {forgetting!r}")
        if not (np.isfinite(penalty).all() and (penalty > 0).all()):
            raise ValueError(f"ridge must be finite and > 0, got {ridge!r}")
        self.theta = np.zeros(p)
        self.covariance = np.diag(1.0 / penalty)
        self.forgetting = forgetting
        self.rows = 0
        self._cap = trace_max * float(np.trace(self.covariance))

    def learn(self, x: Floats, y: float) -> bool:
        """One row x (p,), y; False, and nothing changed, where the update would not be finite."""
        px = self.covariance @ x
        spread = self.forgetting + float(x @ px)
        gain = px / spread
        theta = self.theta + gain * (y - float(x @ self.theta))
        covariance = (self.covariance - np.outer(gain, px)) / self.forgetting
        if not (np.isfinite(spread) and np.isfinite(theta).all() and np.isfinite(covariance).all()):
            return False
        if float(np.trace(covariance)) > self._cap:
            covariance = covariance * self.forgetting
        self.theta = theta
        self.covariance = 0.5 * (covariance + covariance.T)
        self.rows += 1
        return True

    def predict(self, x: Floats) -> Floats:
        """Predicted y of rows x (n, p)."""
        return x @ self.theta
