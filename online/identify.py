"""What the data say about each coefficient, and what they do not.

    C      = (A + H)^-1                           on the columns with evidence
    share_j = 1 - H_jj C_jj                       learned share: 1 = all from data, 0 = all from prior or ridge
    se_j   = sqrt(V_jj)                           V = s^2 C until enough windows are there for the HAC form
    cv_j^2 = A_jj A_ll / A_jl^2 - 1               excitation beyond "so much per step" (l = steps of the row)
    kappa  = cond(D^-1/2 (A + H) D^-1/2)          condition of the scaled system

Status, in this order: ``at_bound`` the constraint holds it at 0 although there is evidence; ``prior_only`` share < 0.5
and there is a prior; ``constant`` cv < 1e-6 beside an intercept; ``identified`` share > 0.9 and se < 20 %;
else ``weak``.
Reference: Belsley, Kuh and Welsch, Regression Diagnostics (1980).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from online.rows import Floats
from online.solve import RELATIVE_RIDGE, Mask

IDENTIFIED_SHARE, PRIOR_SHARE, IDENTIFIED_ERROR, CONSTANT_CV = 0.9, 0.5, 0.2, 1e-6


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Per column: stderr (p,), share (p,), status; and the condition number of the whole."""

    stderr: Floats
    share: Floats
    status: tuple[str, ...]
    condition: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """Inputs of a diagnosis over p columns: A (p, p), H's diagonal (p,), A_jl (p,), A_ll and the noise variance s^2."""

    a: Floats
    precision: Floats
    with_steps: Floats
    steps: float
    variance: float


def diagnose(evidence: Evidence, beta: Floats, passive: Mask, live: Mask, has_prior: Mask) -> Diagnosis:
    """Diagnosis of a solution; dead columns get NaN errors and the status ``absent``."""
    p = len(beta)
    on = np.flatnonzero(live)
    ridge = evidence.precision + RELATIVE_RIDGE * (evidence.a.diagonal() + evidence.precision)
    system = evidence.a + np.diag(ridge)
    scale = 1.0 / np.sqrt(np.where(live, system.diagonal(), 1.0))
    scaled = (system * scale * scale[:, None])[np.ix_(on, on)]
    inverse = np.full((p, p), np.nan)
    inverse[np.ix_(on, on)] = np.linalg.inv(scaled) * np.outer(scale[on], scale[on])
    share = np.clip(1.0 - ridge * inverse.diagonal(), 0.0, 1.0)
    stderr = np.sqrt(np.maximum(evidence.variance * inverse.diagonal(), 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        cv2 = evidence.a.diagonal() * evidence.steps / evidence.with_steps**2 - 1.0
    constant = ~(cv2 > CONSTANT_CV**2)
    status = tuple(
        "absent"
        if not live[j]
        else "at_bound"
        if not passive[j]
        else "prior_only"
        if share[j] < PRIOR_SHARE and has_prior[j]
        else "constant"
        if constant[j] and j > 0
        else "identified"
        if share[j] > IDENTIFIED_SHARE and stderr[j] < IDENTIFIED_ERROR * abs(beta[j])
        else "weak"
        for j in range(p)
    )
    return Diagnosis(stderr, share, status, float(np.linalg.cond(scaled)) if len(on) else 1.0)
