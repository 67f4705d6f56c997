"""What a coefficient owes to the batch shapes that happened to come: standard errors clustered by shape.

No line follows a machine on which batch 3 costs more than 4. Which line comes nearest then depends on the mix of
shapes, and the next hour has another one: more rows of today's mix make no coefficient surer. Per batch shape c the
drift monitor keeps the usual work X_c (p,), the rows n_c and the usual log ratio U_c of observed to X_c beta, of which
log F_c = r_c U_c is believed, so

    z_c   = X_c / X_c beta                  n_c: scaled to the effective rows of A
    d_c   = C z_c n_c m_c                   what beta owes to shape c
    m_c^2 = max(e_c^2 / (1 - h_c), t^2)     its misfit                          h_c = n_c z_c' C z_c <= 0.9
    e_c^2 = log F_c^2 - s_c^2 u_c           u_c = min(1, k / min(n_c, 256)): what noise of spread s_c does not explain
    t^2   = sum_c a_c r_c^2 (U_c^2 - s^2 u_c) / sum_c a_c r_c^2 (1 - h_c) (1 + 1.21 / f)^2 >= 0  f = sum_c a_c (1 - h_c)
    var_j = sum_c d_cj^2 (1 + 1.21 / f_j)^2         f_j = max((sum d^2)^2 / sum d^4, 4): Student's, for few shapes

with k, the variance by HAC per variance of independent noise, for the rows that err together, s^2 the mean of s_c^2
over rows, a_c = n_c / (n_c + 8). A shape with most of the rows pulls the line through itself: what it misfits by cannot
be seen in what is left of it, and is taken to be no less than what the others do, t. So it is in the first minutes of
a server, when nearly all steps are of one request. The noise of shapes with few rows counts in t as far as they are
believed, as their misfit does: whole, it would hide what all of them show together.
Guard: |log F_c|, t <= 1/2. Reference: Bell and McCaffrey, Bias reduction in standard errors for linear regression with
multi-stage samples (Survey Methodology 2002), CR2; t: DerSimonian and Laird, Meta-analysis in clinical trials
(Controlled Clinical Trials 1986).
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
_TYPICAL_ROWS = 8.0
"""Of a shape, from which on it says half of what it can about t."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """G batch shapes: x (G, p), U (G,), the share r of it in log F (G,), spread (G,), rows seen and behind A (G,)."""

    x: Floats
    usual: Floats
    believed: Floats
    spread: Floats
    seen_rows: Floats
    rows: Floats

    def variance(self, beta: Floats, c: Floats, on: Ints, inflation: float) -> Floats:
        """Of the columns ``on``, c (q, q) being their part of (A + H)^-1; ``inflation``: k above, (q,)."""
        z = self.x[:, on] / np.maximum(self.x @ beta, _TINY)[:, None]
        explained = np.minimum(inflation / np.minimum(self.seen_rows, _REMEMBERED_ROWS), 1.0)
        squared = np.minimum((self.believed * self.usual) ** 2, _LOG_MAX**2)
        moved = z @ c
        leverage = np.minimum(self.rows * np.einsum("ij,ij->i", moved, z), LEVERAGE_MAX)
        own = (squared - self.spread**2 * explained) / (1.0 - leverage)
        weight = self.rows**2 * np.maximum(own, self._typical(squared, explained, leverage))
        parts = weight[:, None] * moved**2
        total = parts.sum(axis=0)
        freedom = np.maximum(total**2 / np.maximum((parts**2).sum(axis=0), _NOTHING), _FREEDOM_MIN)
        variance: Floats = total * (1.0 + STUDENT / freedom) ** 2
        return variance

    def _typical(self, squared: Floats, explained: Floats, leverage: Floats) -> float:
        """t^2 of the module's equations, by log F^2 (G,), the share u of noise that is in it (G,) and h (G,)."""
        spread = float(self.rows @ self.spread**2) / max(float(self.rows.sum()), _NOTHING)
        share = self.seen_rows / (self.seen_rows + _TYPICAL_ROWS)
        freedom = max(float(share @ (1.0 - leverage)), 1.0)
        told = share * self.believed**2
        beyond = max(float(share @ squared - spread * (told @ explained)), 0.0)
        per_shape = beyond / max(float(told @ (1.0 - leverage)), _TINY)
        return min(per_shape * (1.0 + STUDENT / freedom) ** 2, _LOG_MAX**2)
