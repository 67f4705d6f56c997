"""What the data say about each coefficient, and what they do not.

    C       = (A + H)^-1                            on the columns with evidence (p, p)
    V       = C (M + u^2 H) C                       H: the prior's part, u = max(s, its misfit); M: online/rls/hac.py
            + the misfit of the form                by batch shape: online/rls/misfit.py
    M       = that of HAC, and not below s^2 A
    se_j    = sqrt(V_jj)                            for few windows such that 1.96 se is Student's 95 %
    share_j = 1 - H_jj C_jj                         learned share: 1 = all from data, 0 = all from prior or ridge
    cv_j^2  = A_jj A_ll / A_jl^2 - 1                excitation beyond "so much per step" (l = steps of the row)
    vif_j   = (A_jj - A_jl^2 / A_ll) C_jj           1 = independent of the others, > 10 = nearly a mixture of them
    kappa   = cond(D^-1/2 (A + H) D^-1/2)           condition of the scaled system

H holds the prior's precision and, in C, the relative ridge of the solver. Coefficients at the bound have no sampling
distribution around 0; their se is that of the unconstrained fit, an upper limit of what could hide there.

Status, the first that applies:

    at_bound    non-negativity holds it at 0 although there is evidence
    prior_only  share < 0.5 and there is a prior: a donor's or data sheet's value
    constant    cv < 1e-6: it never varied beside the steps themselves, so it cannot be told from the intercept
    identified  share > 0.9 and se < 20 % of the coefficient; 2 p + 2 windows; and it took more than one value:
                cv > 0.1 over the strata that have it (chunks of one size price the chunk, not the token)
    weak        anything else: do not act on it alone

What is identified so far is weak all the same where the rows say that they are not of one machine, or not of all its
steps (``as_far_as_it_fits``): half of the predictions of a step are off by more than 15 %, as between two machines that
send under one name, or the target has doubts of its own.

Reference: Belsley, Kuh and Welsch, Regression Diagnostics (1980).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from online.features import Column
from online.rows import Floats, Ints, Mask
from online.snapshot import FeatureSnapshot, ModelSnapshot

from .misfit import Shapes
from .solve import RELATIVE_RIDGE

IDENTIFIED_SHARE, PRIOR_SHARE, IDENTIFIED_ERROR, CONSTANT_CV = 0.9, 0.5, 0.2, 1e-6
ONE_VALUE_CV = 0.1
MEDIAN_ERROR_MAX = 0.15
"""Of the coefficients alone. A standard error says how sure the best line is, not that there is one."""

ABSENT = "absent"
"""Status of a column without evidence and without a prior; it is not published."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Over p columns: A (p, p), the precision beside it (p,) and u^2 H of a prior (p,), A_jl (p,), A_ll, s^2.

    ``meat``: M of HAC, (p, p), None while there are too few windows; ``carried``: there are 2 p + 2. ``spread``: cv
    over the strata that have the column, (p,). ``shapes``: what the form misses by batch shape, where there are some.
    """

    a: Floats
    precision: Floats
    prior: Floats
    with_steps: Floats
    steps: float
    variance: float
    meat: Floats | None
    carried: bool
    spread: Floats
    shapes: Shapes | None = None


@dataclass(frozen=True, slots=True)
class Solved:
    """beta (p,), the passive set, the columns with evidence, those with a prior, and the intercept."""

    beta: Floats
    passive: Mask
    live: Mask
    has_prior: Mask
    intercept: Mask


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Per column (p,), NaN where there is no evidence; and the condition number of the whole."""

    stderr: Floats
    share: Floats
    excitation: Floats
    vif: Floats
    status: tuple[str, ...]
    condition: float


def diagnose(evidence: Evidence, solved: Solved) -> Diagnosis:
    """Error bars, shares and status of a solution; see the module's equations."""
    p, on = len(solved.beta), solved.live.nonzero()[0]
    a, among = evidence.a.diagonal(), (on[:, None], on)
    diagonal = a + evidence.precision
    ridge = evidence.precision + RELATIVE_RIDGE * diagonal
    scale = 1.0 / np.sqrt(diagonal[on])
    outer = scale[:, None] * scale
    system = evidence.a[among]
    system.flat[:: len(on) + 1] += ridge[on]
    scaled = system * scale * scale[:, None]
    inverse: Floats = np.asarray(np.linalg.inv(scaled), np.float64)
    c, v = np.full((2, p), np.nan)
    c[on] = inverse.diagonal() * outer.diagonal()
    noise = _noise(evidence, among, inverse, outer)
    v[on] = noise * outer.diagonal()
    if evidence.shapes is not None and len(on):
        inflation = float((noise / (evidence.variance * inverse.diagonal())).mean())
        v[on] += evidence.shapes.variance(solved.beta, inverse * outer, on, inflation)
    stderr = np.sqrt(v)
    with np.errstate(divide="ignore", invalid="ignore"):
        per_step = np.where(evidence.with_steps > 0.0, evidence.with_steps**2 / evidence.steps, 0.0)
        excitation = np.sqrt(np.maximum(np.where(per_step > 0.0, a / per_step - 1.0, np.inf), 0.0))
        vif = np.maximum((a - per_step) * c, 1.0)
    share = np.minimum(np.maximum(1.0 - ridge * c, 0.0), 1.0)
    varied = evidence.carried & ((evidence.spread > ONE_VALUE_CV) | solved.intercept)
    status = _status(solved, share, stderr, excitation, varied)
    return Diagnosis(stderr, share, excitation, vif, status, _condition(scaled))


def _condition(system: Floats) -> float:
    """Largest by smallest singular value; 1 of nothing."""
    if not len(system):
        return 1.0
    values = np.linalg.svd(system, compute_uv=False).tolist()
    return float(values[0] / values[-1]) if values[-1] > 0.0 else math.inf


def _noise(evidence: Evidence, among: tuple[Ints, Ints], inverse: Floats, outer: Floats) -> Floats:
    """Variance by noise and prior of the scaled columns with evidence, (q,)."""
    prior = np.diag(evidence.prior[among[1]])
    spread = _variance(inverse, (evidence.variance * evidence.a[among] + prior) * outer)
    if evidence.meat is not None:
        spread = np.maximum(spread, _variance(inverse, (evidence.meat[among] + prior) * outer))
    return spread


def _variance(bread: Floats, meat: Floats) -> Floats:
    """Diagonal of C M C."""
    diagonal: Floats = ((bread @ meat) * bread.T).sum(axis=1)
    return diagonal


def _status(solved: Solved, share: Floats, stderr: Floats, excitation: Floats, varied: Mask) -> tuple[str, ...]:
    statuses = []
    shared = bool((solved.intercept & solved.live).any())
    for j, beta in enumerate(solved.beta.tolist()):
        if not solved.live[j]:
            statuses.append(ABSENT)
        elif not solved.passive[j]:
            statuses.append("at_bound")
        elif share[j] < PRIOR_SHARE and solved.has_prior[j]:
            statuses.append("prior_only")
        elif excitation[j] < CONSTANT_CV and shared and not solved.intercept[j]:
            statuses.append("constant")
        elif share[j] > IDENTIFIED_SHARE and stderr[j] < IDENTIFIED_ERROR * abs(beta) and varied[j]:
            statuses.append("identified")
        else:
            statuses.append("weak")
    return tuple(statuses)


def feature_snapshots(
    columns: Sequence[Column], beta: Floats, means: Floats | None, diagnosis: Diagnosis
) -> list[FeatureSnapshot]:
    """What is published of columns with evidence or a prior: beta and means are theirs, then others'."""
    return [
        FeatureSnapshot(
            name=column.name,
            unit=column.unit,
            coefficient=float(beta[j]),
            status=diagnosis.status[j],
            stderr=float(diagnosis.stderr[j]),
            learned_share=float(diagnosis.share[j]),
            excitation=_finite(diagnosis.excitation[j]),
            vif=_finite(diagnosis.vif[j]),
            mean=None if means is None else float(means[j]),
        )
        for j, column in enumerate(columns)
        if diagnosis.status[j] != ABSENT
    ]


def as_far_as_it_fits(model: ModelSnapshot, *, doubted: bool) -> ModelSnapshot:
    """The model with coefficients that are no surer than its predictions; ``doubted``: none of them is identified."""
    if not doubted and (model.error is None or model.error.median_ape <= MEDIAN_ERROR_MAX):
        return model
    features = [
        msgspec.structs.replace(feature, status="weak") if feature.status == "identified" else feature
        for feature in model.features
    ]
    return msgspec.structs.replace(model, features=features)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
