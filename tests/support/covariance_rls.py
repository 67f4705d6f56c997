"""Textbook recursive least squares with exponential forgetting, in covariance form: an oracle for tests.

    k     = P x / (lam + x' P x)          P: (p, p) symmetric positive definite, k: (p,)
    theta = theta + k (y - x' theta)      theta: (p,)
    P     = (P - k x' P) / lam            P before any row: 1 / penalty on the diagonal

The product keeps the information form, sums of w x x', instead. In covariance form P grows without bound where no row
excites a direction while lam < 1 ("wind-up"), and two states do not merge by addition.
Reference: Ljung, System Identification (1999), 11.2; Astrom and Wittenmark, Adaptive Control (1995), 2.2 and 11.5.
"""

from __future__ import annotations

import numpy as np

from online.rows import Floats


class CovarianceRLS:
    """The recursion over rows of p features; ``penalty`` (p,) > 0, ``forgetting`` lam in (0, 1]."""

    def __init__(self, penalty: Floats, forgetting: float = 1.0) -> None:
        self.theta = np.zeros(len(penalty))
        self.covariance = np.diag(1.0 / penalty)
        self.forgetting = forgetting

    def learn(self, x: Floats, y: float) -> None:
        """One row x (p,), y."""
        px = self.covariance @ x
        gain = px / (self.forgetting + float(x @ px))
        self.theta = self.theta + gain * (y - float(x @ self.theta))
        covariance = (self.covariance - np.outer(gain, px)) / self.forgetting
        self.covariance = 0.5 * (covariance + covariance.T)
