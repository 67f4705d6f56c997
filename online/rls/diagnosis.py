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
from dataclasses import dataclass

import msgspec
import numpy as np

from online.constants import NOISE_ROWS, START_ROWS, TINY
from online.features import Column
from online.rows import Floats, Ints
from online.snapshot import FeatureSnapshot, ModelSnapshot, Reason

from .error_bars import Shapes, not_below
from .fit import Fit
from .solve import RELATIVE_RIDGE

# Guess: shares and error at which one may act on a coefficient; cv of a column that never varied, and of one size.
_IDENTIFIED_SHARE, _PRIOR_SHARE, IDENTIFIED_ERROR, _CONSTANT_CV, _ONE_SIZE_CV = 0.9, 0.5, 0.2, 1e-6, 0.1
# Source: the rule of thumb of the literature (Belsley, Kuh and Welsch; see the module's head).
VIF_MAX = 10.0
# Guess: two machines 50 % apart are beyond it. A standard error says how sure the best line is, not that there is one.
_MEDIAN_ERROR_MAX = 0.15
# Measured: windows from which sampling errors alone are calibrated where no line fits (tests/bench/learning_bars.py).
_FADED_WINDOWS = 40
# Of rows between two scrapes of a page: with coefficients per standard error below 8 they were off by 6 to 25 % in the
# median, one in ten by 40 to 70 %. The floor of 10 % leaves 10 at most. Measured: on recordings with both.
_SURE_T, _WEAK_T = 8.0, 4.0
_ABSENT = "absent"
"""Status of a column without evidence and without a prior; it is not published."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Covariance (p, p), form error (p,) and more per column (p,), NaN where there is no evidence; condition number."""

    covariance: Floats
    form_error: Floats
    share: Floats
    excitation: Floats
    vif: Floats
    condition: float
    status: list[str]
    reason: list[Reason | None]

    @property
    def stderr(self) -> Floats:
        """Standard errors, (p,)."""
        return np.sqrt(self.covariance.diagonal())


def diagnose(fit: Fit, g: Floats, scale: float, variance: float, shapes: Shapes | None) -> Diagnosis:
    """Error bars, shares and status of the solution of statistics g (q, q); see the module's equations.

    ``scale``: s; ``variance``: of the residuals, in weighted units; ``shapes``: what the form misses, where known.
    """
    p, on = fit.p, fit.live.nonzero()[0]
    among = (on[:, None], on)
    a, per_step, steps = g[:p, :p].diagonal(), g[:p, p + 1], max(float(g[p + 1, p + 1]), TINY)
    precision = fit.precision(scale)
    ridge = precision + RELATIVE_RIDGE * (a + precision)
    unit = 1.0 / np.sqrt((a + precision)[on])
    outer = unit[:, None] * unit
    system = g[among] * outer
    system.flat[:: len(on) + 1] += ridge[on] * unit**2
    inverse: Floats = np.asarray(np.linalg.inv(system), np.float64)
    c, covariance, form_error = np.full(p, np.nan), np.full((p, p), np.nan), np.full(p, np.nan)
    c[on] = inverse.diagonal() * unit**2
    variance *= fit.strata.squared_share()
    sampling = _sampling(fit, g[among], inverse, outer, scale, variance, on)
    if shapes is not None and len(on):
        inflation = float((sampling.diagonal() / (variance * inverse.diagonal())).mean())
        form = shapes.covariance(fit.beta, inverse * outer, on, inflation)
        form_error[on] = np.sqrt(form.diagonal())
        first, last = START_ROWS, _FADED_WINDOWS * NOISE_ROWS
        fade = (last - float(fit.strata.n1.sum())) / (last - first)
        sampling += min(max(fade, 0.0), 1.0) * form / outer
    covariance[among] = sampling * outer
    with np.errstate(divide="ignore", invalid="ignore"):
        alike = np.where(per_step > 0.0, per_step**2 / steps, 0.0)
        excitation = np.sqrt(np.maximum(np.where(alike > 0.0, a / alike - 1.0, np.inf), 0.0))
        vif = np.maximum((a - alike) * c, 1.0)
    share = np.minimum(np.maximum(1.0 - ridge * c, 0.0), 1.0)
    told = Diagnosis(covariance, form_error, share, excitation, vif, _condition(system), [], [])
    _judge(told, fit)
    return told


def _condition(system: Floats) -> float:
    """Largest by smallest singular value; 1 of nothing."""
    if not len(system):
        return 1.0
    values = np.linalg.svd(system, compute_uv=False).tolist()
    return float(values[0] / values[-1]) if values[-1] > 0.0 else math.inf


def _sampling(fit: Fit, a: Floats, inverse: Floats, outer: Floats, scale: float, variance: float, on: Ints) -> Floats:
    """Covariance by noise and prior of the scaled columns with evidence, (q, q)."""
    prior = np.diag(np.zeros(len(on)) if fit.prior is None else fit.prior.score_variance(scale)[on])
    independent: Floats = inverse @ ((variance * a + prior) * outer) @ inverse
    meat = fit.meat.of_scores(len(on))
    if meat is None or not len(on):
        return independent
    return not_below(inverse @ ((meat[np.ix_(on, on)] + prior) * outer) @ inverse, independent)


def _judge(told: Diagnosis, fit: Fit) -> None:
    """Status and reason of every column."""
    stderr, spread = told.stderr, fit.strata.spread()
    carried = fit.meat.carries(int(np.count_nonzero(fit.live)))
    shared = bool((fit.intercept & fit.live).any())
    known = np.zeros(fit.p, np.bool_) if fit.prior is None else np.isfinite(fit.prior.sd)
    for j, beta in enumerate(fit.beta.tolist()):
        reason, intercept = None, bool(fit.intercept[j])
        if not fit.live[j]:
            status = _ABSENT
        elif not fit.passive[j]:
            status = "at_bound"
        elif told.share[j] < _PRIOR_SHARE and known[j]:
            status = "prior_only"
        elif told.excitation[j] < _CONSTANT_CV and shared and not intercept:
            status = "constant"
        else:
            if not carried or told.share[j] <= _IDENTIFIED_SHARE:
                reason = Reason.FEW_ROWS
            elif told.vif[j] > VIF_MAX:
                reason = Reason.COLLINEAR
            elif not intercept and spread[j] <= _ONE_SIZE_CV:
                reason = Reason.ONE_SIZE
            elif stderr[j] >= IDENTIFIED_ERROR * abs(beta):
                reason = Reason.WIDE
            status = "weak" if reason else "identified"
        told.status.append(status)
        told.reason.append(reason)


# ------------------------------------------------------------------- as published


def model_snapshot(columns: Sequence[Column], beta: Floats, means: Floats | None, told: Diagnosis) -> ModelSnapshot:
    """What is published of columns with evidence or a prior: beta and means are theirs, then others'."""
    published = [j for j in range(len(columns)) if told.status[j] != _ABSENT]
    stderr = told.stderr
    features = [
        FeatureSnapshot(
            name=columns[j].name,
            unit=columns[j].unit,
            coefficient=float(beta[j]),
            status=told.status[j],
            reason=told.reason[j],
            stderr=None if told.vif[j] > VIF_MAX and told.status[j] != "prior_only" else float(stderr[j]),
            form_error=_finite(told.form_error[j]),
            learned_share=float(told.share[j]),
            excitation=_finite(told.excitation[j]),
            vif=_finite(told.vif[j]),
            mean=None if means is None else float(means[j]),
        )
        for j in published
    ]
    covariance = told.covariance[np.ix_(published, published)].tolist()
    condition = told.condition
    return ModelSnapshot(
        features=features, rows=0, effective_rows=0.0, condition_number=condition, covariance=covariance
    )


def of_windows(model: ModelSnapshot, covariance: Floats | None) -> ModelSnapshot:
    """The model with the error bars and status of rows between two scrapes of a page.

    ``covariance`` of its features, (p, p), None where the rows are too few. identified from t = beta / se = 8 on, below
    4 unidentified: columns trade with each other, and only predictions are of use.
    """
    bars = [None] * len(model.features) if covariance is None else np.sqrt(covariance.diagonal()).tolist()
    features = []
    for feature, bar in zip(model.features, bars, strict=True):
        size, stderr, status = abs(feature.coefficient), bar, "unidentified"
        reason: Reason | None = Reason.FEW_ROWS
        if bar is not None and feature.vif is not None and feature.vif > VIF_MAX:
            stderr, reason = None, Reason.COLLINEAR
        elif bar is not None and size > 0.0 and size >= _SURE_T * bar:
            status, reason = "identified", None
        elif bar is not None:
            status, reason = "weak" if size > 0.0 and size >= _WEAK_T * bar else status, Reason.WIDE
        told = {"stderr": stderr, "form_error": None, "status": status, "reason": reason}
        features.append(msgspec.structs.replace(feature, **told))
    listed = [] if covariance is None else covariance.tolist()
    return msgspec.structs.replace(model, features=features, covariance=listed)


def as_far_as_it_fits(model: ModelSnapshot, doubt: Reason | None) -> ModelSnapshot:
    """The model with coefficients that are no surer than its predictions; with a ``doubt`` none is identified."""
    if doubt is None and model.error is not None and model.error.median_ape > _MEDIAN_ERROR_MAX:
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
