"""What the data say about each coefficient, and what they do not.

    C       = (A + H)^-1                            on the columns with evidence (p, p)
    V       = C (M + u^2 H) C + fade W              H: the prior's part, u = max(s, its misfit); M, W: error_bars.py
    M       = Newey and West's, and in no direction below s^2 A n2 / n1 (n1, n2: online/rls/strata.py)
    fade    = 1 up to 256 rows, 0 from 1,280 on: as windows of scores become enough to show the misfit of this load
    se_j    = sqrt(V_jj)                            for few windows such that 1.96 se is Student's 95 %
    form_j  = sqrt(W_jj)                            how far the coefficient moves when the load changes
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
    weak        do not act on it alone; for one of the reasons below
    identified  all else

Reasons of a weak coefficient, the first that applies:

    few_rows             fewer than 2 p + 2 windows of 32 rows, or a tenth of it is still a prior's
    collinear            vif > 10: it trades with other columns; it has no error bar, but the covariance has it
    one_size             cv <= 0.1 over the strata that have it: chunks of one size price the chunk, not the token
    wide                 se >= 20 % of the coefficient
    clock_grain          the clock of the telemetry is too coarse for these steps
    two_speeds           the rows are of machines of two speeds
    poor_fit             half of the predictions of a step are off by more than 15 %
    hidden_prefix_hits   prompt tokens that the prefix cache had are told as if they were computed

Reference: Belsley, Kuh and Welsch, Regression Diagnostics (1980).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from online.constants import NOISE_ROWS, START_ROWS
from online.features import Column
from online.rows import Floats, Ints, Mask
from online.snapshot import FeatureSnapshot, ModelSnapshot, Reason

from .error_bars import Shapes, not_below
from .solve import RELATIVE_RIDGE

# Guess: shares and error at which one may act on a coefficient. Guard: 1e-6 is rounding of cv.
IDENTIFIED_SHARE, PRIOR_SHARE, IDENTIFIED_ERROR, CONSTANT_CV = 0.9, 0.5, 0.2, 1e-6
# Guess: below, chunks count as of one size.
ONE_VALUE_CV = 0.1
# Source: the rule of thumb of the literature (Belsley, Kuh and Welsch; see the module's head).
VIF_MAX = 10.0
# Guess: two machines 50 % apart are beyond it.
MEDIAN_ERROR_MAX = 0.15
"""Of the coefficients alone. A standard error says how sure the best line is, not that there is one."""
# Measured: as follows.
FADED_WINDOWS = 40
"""Windows of scores, from the first fit on: from there on sampling errors alone are calibrated on machines that no line
fits (tests/bench/learning_bars.py)."""
# Measured: as follows.
SURE_T, WEAK_T = 8.0, 4.0
"""Coefficients per standard error, of rows between two scrapes of a page: with t below 8 they were off by 6 to 25 % in
the median where this was measured, one in ten by 40 to 70 %. The floor of 10 % leaves t <= 10."""

ABSENT = "absent"
"""Status of a column without evidence and without a prior; it is not published."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A solution and what it rests on, over p columns.

    beta (p,), passive set, columns with evidence (``live``), with a prior, and the intercept, (p,) each; A (p, p), the
    precision beside it (p,) and u^2 H of a prior (p,), A_jl (p,), A_ll, s^2 n2 / n1.
    ``meat``: M of Newey and West, (p, p), None while there are too few windows; ``carried``: there are 2 p + 2.
    ``spread``: cv over the strata that have the column, (p,). ``rows`` that are remembered. ``shapes``: what the form
    misses by batch shape, where there are some.
    """

    beta: Floats
    passive: Mask
    live: Mask
    has_prior: Mask
    intercept: Mask
    a: Floats
    precision: Floats
    prior: Floats
    with_steps: Floats
    steps: float
    variance: float
    meat: Floats | None
    carried: bool
    spread: Floats
    rows: float
    shapes: Shapes | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Covariance (p, p), form error (p,) and more per column (p,), NaN where there is no evidence; condition number."""

    covariance: Floats
    form_error: Floats
    share: Floats
    excitation: Floats
    vif: Floats
    status: tuple[str, ...]
    reason: tuple[Reason | None, ...]
    condition: float

    @property
    def stderr(self) -> Floats:
        """Standard errors, (p,)."""
        return np.sqrt(self.covariance.diagonal())


def diagnose(evidence: Evidence) -> Diagnosis:
    """Error bars, shares and status of a solution; see the module's equations."""
    p, on = len(evidence.beta), evidence.live.nonzero()[0]
    a, among = evidence.a.diagonal(), (on[:, None], on)
    diagonal = a + evidence.precision
    ridge = evidence.precision + RELATIVE_RIDGE * diagonal
    scale = 1.0 / np.sqrt(diagonal[on])
    outer = scale[:, None] * scale
    system = evidence.a[among]
    system.flat[:: len(on) + 1] += ridge[on]
    scaled = system * outer
    inverse: Floats = np.asarray(np.linalg.inv(scaled), np.float64)
    c = np.full(p, np.nan)
    c[on] = inverse.diagonal() * outer.diagonal()
    covariance, form_error = np.full((p, p), np.nan), np.full(p, np.nan)
    sampling = _sampling(evidence, among, inverse, outer)
    if evidence.shapes is not None and len(on):
        inflation = float((sampling.diagonal() / (evidence.variance * inverse.diagonal())).mean())
        form = evidence.shapes.covariance(evidence.beta, inverse * outer, on, inflation)
        form_error[on] = np.sqrt(form.diagonal())
        sampling += _faded(evidence.rows) * form / outer
    covariance[among] = sampling * outer
    with np.errstate(divide="ignore", invalid="ignore"):
        per_step = np.where(evidence.with_steps > 0.0, evidence.with_steps**2 / evidence.steps, 0.0)
        excitation = np.sqrt(np.maximum(np.where(per_step > 0.0, a / per_step - 1.0, np.inf), 0.0))
        vif = np.maximum((a - per_step) * c, 1.0)
    share = np.minimum(np.maximum(1.0 - ridge * c, 0.0), 1.0)
    told = Diagnosis(covariance, form_error, share, excitation, vif, (), (), _condition(scaled))
    status, reason = _status(told, evidence)
    return replace(told, status=status, reason=reason)


def _faded(rows: float) -> float:
    """The part of the form error that counts as sampling error while windows of scores are few."""
    first, last = START_ROWS, FADED_WINDOWS * NOISE_ROWS
    return min(max((last - rows) / (last - first), 0.0), 1.0)


def _condition(system: Floats) -> float:
    """Largest by smallest singular value; 1 of nothing."""
    if not len(system):
        return 1.0
    values = np.linalg.svd(system, compute_uv=False).tolist()
    return float(values[0] / values[-1]) if values[-1] > 0.0 else math.inf


def _sampling(evidence: Evidence, among: tuple[Ints, Ints], inverse: Floats, outer: Floats) -> Floats:
    """Covariance by noise and prior of the scaled columns with evidence, (q, q)."""
    prior = np.diag(evidence.prior[among[1]])
    independent: Floats = inverse @ ((evidence.variance * evidence.a[among] + prior) * outer) @ inverse
    if evidence.meat is None or not len(inverse):
        return independent
    return not_below(inverse @ ((evidence.meat[among] + prior) * outer) @ inverse, independent)


def _status(told: Diagnosis, evidence: Evidence) -> tuple[tuple[str, ...], tuple[Reason | None, ...]]:
    shared = bool((evidence.intercept & evidence.live).any())
    stderr, statuses, reasons = told.stderr, [], []
    for j, beta in enumerate(evidence.beta.tolist()):
        reason = None
        if not evidence.live[j]:
            status = ABSENT
        elif not evidence.passive[j]:
            status = "at_bound"
        elif told.share[j] < PRIOR_SHARE and evidence.has_prior[j]:
            status = "prior_only"
        elif told.excitation[j] < CONSTANT_CV and shared and not evidence.intercept[j]:
            status = "constant"
        else:
            varied = evidence.spread[j] > ONE_VALUE_CV or bool(evidence.intercept[j])
            sure = stderr[j] < IDENTIFIED_ERROR * abs(beta)
            reason = _weakness(told, j, carried=evidence.carried, varied=varied, sure=sure)
            status = "weak" if reason else "identified"
        statuses.append(status)
        reasons.append(reason)
    return tuple(statuses), tuple(reasons)


def _weakness(told: Diagnosis, j: int, *, carried: bool, varied: bool, sure: bool) -> Reason | None:
    """Why column j should not be used alone; None where it may be."""
    if not carried or told.share[j] <= IDENTIFIED_SHARE:
        return Reason.FEW_ROWS
    if told.vif[j] > VIF_MAX:
        return Reason.COLLINEAR
    if not varied:
        return Reason.ONE_SIZE
    return None if sure else Reason.WIDE


def model_snapshot(columns: Sequence[Column], beta: Floats, means: Floats | None, told: Diagnosis) -> ModelSnapshot:
    """What is published of columns with evidence or a prior: beta and means are theirs, then others'."""
    published = [j for j in range(len(columns)) if told.status[j] != ABSENT]
    features = [
        FeatureSnapshot(
            name=columns[j].name,
            unit=columns[j].unit,
            coefficient=float(beta[j]),
            status=told.status[j],
            reason=told.reason[j],
            stderr=None if told.vif[j] > VIF_MAX and told.status[j] != "prior_only" else float(told.stderr[j]),
            form_error=_finite(told.form_error[j]),
            learned_share=float(told.share[j]),
            excitation=_finite(told.excitation[j]),
            vif=_finite(told.vif[j]),
            mean=None if means is None else float(means[j]),
        )
        for j in published
    ]
    covariance = told.covariance[np.ix_(published, published)]
    return ModelSnapshot(
        features=features, rows=0, effective_rows=0.0, condition_number=told.condition, covariance=covariance.tolist()
    )


def of_windows(model: ModelSnapshot, covariance: Floats | None) -> ModelSnapshot:
    """The model with the error bars and status of rows between two scrapes of a page.

    ``covariance`` of its features, (p, p), None where the rows are too few. identified from t = beta / se = 8 on, below
    4 unidentified: columns trade with each other, and only predictions are of use.
    """
    bars = [None] * len(model.features) if covariance is None else np.sqrt(covariance.diagonal()).tolist()
    features = [_of_window(feature, bar) for feature, bar in zip(model.features, bars, strict=True)]
    told = [] if covariance is None else covariance.tolist()
    return msgspec.structs.replace(model, features=features, covariance=told)


def _of_window(feature: FeatureSnapshot, stderr: float | None) -> FeatureSnapshot:
    size, reason = abs(feature.coefficient), None
    status = "unidentified"
    if stderr is None:
        reason = Reason.FEW_ROWS
    elif feature.vif is not None and feature.vif > VIF_MAX:
        stderr, reason = None, Reason.COLLINEAR
    elif size == 0.0 or size < SURE_T * stderr:
        reason = Reason.WIDE
        status = "weak" if size > 0.0 and size >= WEAK_T * stderr else status
    else:
        status = "identified"
    return msgspec.structs.replace(feature, stderr=stderr, form_error=None, status=status, reason=reason)


def as_far_as_it_fits(model: ModelSnapshot, doubt: Reason | None) -> ModelSnapshot:
    """The model with coefficients that are no surer than its predictions; with a ``doubt`` none is identified."""
    if doubt is None and model.error is not None and model.error.median_ape > MEDIAN_ERROR_MAX:
        doubt = Reason.POOR_FIT
    if doubt is None:
        return model
    features = [
        msgspec.structs.replace(feature, status="weak", reason=doubt) if feature.status == "identified" else feature
        for feature in model.features
    ]
    return msgspec.structs.replace(model, features=features)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
