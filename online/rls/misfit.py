"""What a coefficient owes to the batch shapes that happened to come: standard errors clustered by shape.

No line follows a machine on which batch 3 costs more than 4. Which line comes nearest then depends on the mix of
shapes, and the next hour has another one: more rows of today's mix make no coefficient surer. Per batch shape c the
drift monitor keeps the usual work X_c (p,), the rows n_c and the usual log ratio log F_c of observed to X_c beta, so

    z_c   = X_c / X_c beta                  n_c: scaled to the effective rows of A
    d_c   = C z_c n_c e_c / sqrt(1 - h_c)   what beta owes to shape c           h_c = n_c z_c' C z_c <= 0.9
    var_j = sum_c d_cj^2 (1 + 1.21 / f_j)^2         f_j = max((sum d^2)^2 / sum d^4, 4): Student's, for few shapes
    e_c^2 = max(log F_c^2 - s_c^2 min(1, k / min(n_c, 256)), 0)         what noise of spread s_c does not explain

with k, the variance by HAC per variance of independent noise, for the rows that err together.
Guard: |log F_c| <= 1/2. Reference: Bell and McCaffrey, Bias reduction in standard errors for linear regression with
multi-stage samples (Survey Methodology 2002), CR2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from online.rows import Floats, Ints

from .hac import STUDENT

LEVERAGE_MAX = 0.9
_TINY, _NOTHING = 1e-9, 1e-300
_FREEDOM_MIN = 4.0
_LOG_MAX = 0.5
_REMEMBERED_ROWS = 256.0


@dataclass(frozen=True, slots=True)
class Shapes:
    """G batch shapes: x (G, p), log F (G,), spread (G,), rows seen (G,), and rows behind A (G,)."""

    x: Floats
    log_factor: Floats
    spread: Floats
    seen_rows: Floats
    rows: Floats

    def variance(self, beta: Floats, c: Floats, on: Ints, inflation: float) -> Floats:
        """Of the columns ``on``, c (q, q) being their part of (A + H)^-1; ``inflation``: k above, (q,)."""
        z = self.x[:, on] / np.maximum(self.x @ beta, _TINY)[:, None]
        explained = np.minimum(inflation / np.minimum(self.seen_rows, _REMEMBERED_ROWS), 1.0)
        error = np.minimum(self.log_factor**2, _LOG_MAX**2) - self.spread**2 * explained
        moved = z @ c
        leverage = np.minimum(self.rows * np.einsum("ij,ij->i", moved, z), LEVERAGE_MAX)
        weight = self.rows**2 * np.maximum(error, 0.0) / (1.0 - leverage)
        parts = weight[:, None] * moved**2
        total = parts.sum(axis=0)
        freedom = np.maximum(total**2 / np.maximum((parts**2).sum(axis=0), _NOTHING), _FREEDOM_MIN)
        variance: Floats = total * (1.0 + STUDENT / freedom) ** 2
        return variance
