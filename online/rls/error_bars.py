"""How far a coefficient may be off: under the load that it was learned from, and how far it moves with the load.

On the columns with evidence, (p, p) each:

    C      = (A + H)^-1                          H: the prior's part and, in C, the solver's relative ridge
    V      = C (M + u^2 H) C + fade W            covariance; the prior's scores have variance u^2 H, u: its noise
    fade   = 1 up to 256 rows, 0 from 1,280 on   few windows do not show yet what the form misses under this load
    se_j   = sqrt(V_jj); V is in no direction below that of independent noise, M = s^2 A n2 / n1 (online/rls/strata.py)
    form_j = sqrt(W_jj)

**Sampling error** is that of scores (``ScoreCovariance`` in online/rls/strata.py).

**Form error** (:func:`form_covariance`): no line follows a machine on which batch 3 costs more than 4, and which line
comes nearest depends on the mix of shapes. It is a sandwich clustered by batch shape c, of mean work X_c (p,), n_c
rows, N_c of the effective rows of A, spread s_c, and factor F_c:

    z_c = X_c / X_c beta                                         h_c = N_c z_c' C z_c <= 0.9
    e_c = (log F_c^2 - (s_c n_c / (n_c + 8))^2 / min(n_c, 256)) / (1 - h_c)     misfit squared, less what noise explains
    m_c = max(e_c, mean of e over the shapes, 0)^(1/2)
    W   = sum_c d_c d_c'        d_c = C z_c N_c m_c              what beta owes to shape c

A shape with most of the rows pulls the line through itself, h_c -> 1: its misfit is hidden in the line, and is taken to
be no less than that of the others (CR2; Bell and McCaffrey, Survey Methodology 2002). W does not shrink with the rows:
it is an indication of how far a coefficient moves when the mix of shapes changes, and covers no load that was not seen.

**Rows between two scrapes of a page** are a window each, and say nothing of shapes. In place of W they have

    diag(floor_j beta_j)^2                       floor: 2 % intercept, else 10 %

Sums over a window carry an error that more rows do not average out: where in it the prompts came. No estimate of the
variance by residuals sees it, nor does a jackknife (their 90 % intervals hold half of the prefill coefficients); the
floor was measured, on recordings with complete telemetry beside the pages.

**Status**, the first that applies:

    at_bound    non-negativity holds it at 0 although there is evidence; its se is that of the unconstrained fit
    prior_only  share < 0.5 and there is a prior: a donor's or data sheet's value       share_j = 1 - H_jj C_jj
    constant    it never varied beside the steps l themselves, so it cannot be told from the intercept:
                cv < 1e-6                                                               cv_j^2 = A_jj A_ll / A_jl^2 - 1
    weak        do not act on it alone, for a reason; their order and meaning: docs/learning.md
    identified  all else

    vif_j = (A_jj - A_jl^2 / A_ll) C_jj          1 = independent of the others, > 10 = nearly a mixture of them

Reference: Belsley, Kuh and Welsch, Regression Diagnostics (1980).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from online.constants import ERROR_MAX, LACK_OF_FIT, MEMORY_ROWS, START_ROWS, TINY, TINY_US
from online.rows import Floats, Ints
from online.shapes import shrinkage
from online.snapshot import FeatureSnapshot, ModelSnapshot, Reason

from .solve import RELATIVE_RIDGE

if TYPE_CHECKING:
    from .learner import RlsLearner


def not_below(covariance: Floats, least: Floats) -> Floats:
    """The covariance (q, q), raised to ``least`` (q, q) in every direction in which it is below it.

    In the coordinates in which ``least`` is the identity, eigenvalues below 1 become 1: a sum of coefficients, too, has
    no smaller error than independent noise of the rows gives it. Few windows of scores say less in some direction: on
    simulated servers, a hundredth of it for the scheduler's time.
    """
    values, vectors = np.linalg.eigh(least)
    root = vectors * np.sqrt(np.maximum(values, values[-1:] * 1e-14 + TINY))
    whiten = np.linalg.inv(root)
    values, vectors = np.linalg.eigh(whiten @ covariance @ whiten.T)
    sides = (root @ vectors) * np.sqrt(np.maximum(values, 1.0))
    raised: Floats = sides @ sides.T
    return raised


def form_covariance(learner: RlsLearner, c: Floats, on: Ints) -> Floats:
    """W of the columns ``on``, (q, q); c (q, q): their part of (A + H)^-1."""
    shapes, beta = learner.shapes, learner.beta
    visited = shapes.rows.nonzero()[0]
    x, rows = shapes.x[visited], shapes.rows[visited]
    z = x[:, on] / np.maximum(x @ beta, TINY_US)[:, None]
    rows_of_fit = rows * (learner.strata.effective_rows() / float(rows.sum()))
    leverage = np.minimum(rows_of_fit * np.einsum("ij,ij->i", z @ c, z), 0.9)
    misfit = np.minimum(shapes.log_factors(visited, beta) ** 2, ERROR_MAX**2)
    misfit -= np.square(shrinkage(rows) * shapes.spread[visited]) / np.minimum(rows, MEMORY_ROWS)
    misfit /= 1.0 - leverage
    misfit = np.maximum(misfit, max(float(misfit.mean()), 0.0))
    moved = (z @ c) * rows_of_fit[:, None]
    covariance: Floats = (moved * misfit[:, None]).T @ moved
    return covariance


# Guess: shares and error at which one may act on a coefficient; cv of a column that never varied, and of one size.
_IDENTIFIED_SHARE, _PRIOR_SHARE, IDENTIFIED_ERROR, _CONSTANT_CV, _ONE_SIZE_CV = 0.9, 0.5, 0.2, 1e-6, 0.1
# Source: the rule of thumb of the literature (Belsley, Kuh and Welsch; see the module's head).
VIF_MAX = 10.0
# Guess: two machines 50 % apart are beyond it. A standard error says how sure the best line is, not that there is one.
_MEDIAN_ERROR_MAX = 0.15
# Measured: rows from which sampling errors alone are calibrated where no line fits (tests/bench/learning_bars.py).
_FADED_ROWS = 1280
# Of rows between two scrapes of a page: with coefficients per standard error below 8 they were off by 6 to 25 % in the
# median, one in ten by 40 to 70 %. Measured: on recordings with both.
_OF_PAGES_ERROR = 0.125
_ABSENT = "absent"
"""Status of a column without evidence and without a prior; it is not published."""


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """Covariance (p, p), form error (p,) and more per column (p,), NaN where there is no evidence; condition number."""

    covariance: Floats
    form_error: Floats
    vif: Floats
    condition: float
    status: list[str]
    reason: list[Reason | None]

    @property
    def stderr(self) -> Floats:
        """Standard errors, (p,)."""
        return np.sqrt(self.covariance.diagonal())


def diagnose(learner: RlsLearner, variance: float) -> InferenceResult:
    """Error bars, shares and status of a learner's solution; see the module's equations.

    ``variance``: of the residuals, in weighted units. Shape factors say what the form misses. Where they have less than
    half of the rows, they are not kept up and say nothing.
    """
    p, g, h, on = learner.p, learner.strata.total(), learner.h, learner.live.nonzero()[0]
    among = (on[:, None], on)
    a, per_step, steps = g[:p, :p].diagonal(), g[:p, p + 1], max(float(g[p + 1, p + 1]), TINY)
    ridge = h + RELATIVE_RIDGE * (a + h)
    unit = 1.0 / np.sqrt((a + h)[on])
    scaled = g[among] * np.outer(unit, unit) + np.diag(ridge[on] * unit**2)
    c: Floats = np.linalg.inv(scaled) * np.outer(unit, unit)
    inverse, covariance, form_error = (np.full(shape, np.nan) for shape in (p, (p, p), p))
    inverse[on] = c.diagonal()
    rows = float(learner.strata.n1.sum())
    variance *= float(learner.strata.n2.sum()) / rows if rows > 0.0 else 1.0  # what squared weights amount to
    covariance[among] = _sampling(learner, variance * g[among], c, on)
    if learner.by_pages:
        covariance[among] += np.diag((np.where(learner.intercept, LACK_OF_FIT, 0.1) * learner.beta)[on] ** 2)
    elif learner.features.target.vector == "beta" and len(on) and learner.shapes.rows.sum() >= max(0.5 * rows, TINY):
        form = form_covariance(learner, c, on)
        form_error[on] = np.sqrt(form.diagonal())
        fade = (_FADED_ROWS - rows) / (_FADED_ROWS - START_ROWS)
        covariance[among] += min(max(fade, 0.0), 1.0) * form
    with np.errstate(divide="ignore", invalid="ignore"):
        alike = np.where(per_step > 0.0, per_step**2 / steps, 0.0)
        excitation = np.sqrt(np.maximum(np.where(alike > 0.0, a / alike - 1.0, np.inf), 0.0))
        vif = np.maximum((a - alike) * inverse, 1.0)
    share = np.minimum(np.maximum(1.0 - ridge * inverse, 0.0), 1.0)
    condition = float(np.linalg.cond(scaled)) if len(on) else 1.0
    result = InferenceResult(covariance, form_error, vif, condition, [], [])
    _judge(result, learner, share, excitation)
    return result


def _sampling(learner: RlsLearner, noise: Floats, c: Floats, on: Ints) -> Floats:
    """Covariance by noise and prior of the columns with evidence, (q, q); ``noise``: s^2 A, of independent rows."""
    known = learner.prior
    prior = np.diag(np.zeros(len(on)) if known is None else known.score_variance(learner.scale)[on])
    independent: Floats = c @ (noise + prior) @ c
    of_scores = learner.strata.scores.of_scores(len(on))
    if of_scores is None:
        return independent
    return not_below(c @ (of_scores[np.ix_(on, on)] + prior) @ c, independent)


def _judge(result: InferenceResult, learner: RlsLearner, share: Floats, excitation: Floats) -> None:
    """Status and reason of every column, from its part of the information and its cv, (p,) each."""
    stderr, spread, live = result.stderr, learner.strata.spread(), learner.live
    most = _OF_PAGES_ERROR if learner.by_pages else IDENTIFIED_ERROR
    carried = float(learner.strata.scores.windows.sum()) > 2 * np.count_nonzero(live) + 1
    shared = bool((learner.intercept & live).any())
    known = np.zeros(learner.p, np.bool_) if learner.prior is None else np.isfinite(learner.prior.sd)
    for j, beta in enumerate(learner.beta.tolist()):
        reason, intercept = None, bool(learner.intercept[j])
        if not live[j]:
            status = _ABSENT
        elif not learner.passive[j]:
            status = "at_bound"
        elif share[j] < _PRIOR_SHARE and known[j]:
            status = "prior_only"
        elif excitation[j] < _CONSTANT_CV and shared and not intercept:
            status = "constant"
        else:
            if not carried or share[j] <= _IDENTIFIED_SHARE:
                reason = Reason.FEW_ROWS
            elif result.vif[j] > VIF_MAX:
                reason = Reason.COLLINEAR
            elif not intercept and spread[j] <= _ONE_SIZE_CV:
                reason = Reason.ONE_SIZE
            elif stderr[j] >= most * abs(beta):
                reason = Reason.WIDE
            status = "weak" if reason else "identified"
        result.status.append(status)
        result.reason.append(reason)


# ------------------------------------------------------------------- as published


def as_published(learner: RlsLearner) -> ModelSnapshot:
    """The model as published; columns without evidence and without a prior are left out. It needs a first fit."""
    result, means, columns = learner.infer(), learner.sums / learner.sums[-1], learner.features.columns
    published = [j for j in range(len(columns)) if result.status[j] != _ABSENT]
    stderr = result.stderr
    features = [
        FeatureSnapshot(
            name=columns[j].name,
            unit=columns[j].unit,
            coefficient=float(learner.beta[j]),
            status=result.status[j],
            reason=result.reason[j],
            stderr=None if result.vif[j] > VIF_MAX and result.status[j] != "prior_only" else float(stderr[j]),
            form_error=_finite(result.form_error[j]),
            vif=_finite(result.vif[j]),
            mean=float(means[j]),
        )
        for j in published
    ]
    return ModelSnapshot(
        features=features,
        rows=learner.rows,
        effective_rows=learner.strata.effective_rows(),
        error=learner.error.snapshot(),
        condition_number=result.condition,
        covariance=result.covariance[np.ix_(published, published)].tolist(),
    )


def doubt_identified(model: ModelSnapshot, doubt: Reason | None) -> ModelSnapshot:
    """The model with coefficients that are no surer than its predictions; with a ``doubt`` none is identified."""
    if doubt is None and model.error is not None and model.error.median_ape > _MEDIAN_ERROR_MAX:
        doubt = Reason.POOR_FIT
    if doubt is None:
        return model
    features = [
        msgspec.structs.replace(each, status="weak", reason=doubt) if each.status == "identified" else each
        for each in model.features
    ]
    return msgspec.structs.replace(model, features=features)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
