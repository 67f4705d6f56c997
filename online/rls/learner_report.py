"""What the ``rls`` learner publishes: coefficients with error bars and status, errors, the mean, and priors for others.

Reading changes nothing that is learned later, except where rows are still held: they are fitted once more, with the
same result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from online.snapshot import FeatureSnapshot, ModelSnapshot

from .fast_member import FAST, SLOW
from .identify import Diagnosis, Evidence, Solved, diagnose
from .prior import Prior

if TYPE_CHECKING:
    from .rls_learner import RlsLearner


def diagnosis_of(learner: RlsLearner) -> Diagnosis:
    """Error bars and status of the published coefficients; needs a first fit."""
    p, g = learner.p, learner.statistics()
    precision = learner.precision()
    known = np.zeros(p) if precision is None else precision
    meat, windows = learner.meat.total()
    evidence = Evidence(
        a=g[:p, :p],
        precision=known,
        with_steps=g[:p, p + 1],
        steps=max(float(g[p + 1, p + 1]), 1e-300),
        variance=float(learner.scale[SLOW]) ** 2,
        meat=meat,
        windows=windows,
    )
    return diagnose(evidence, Solved(learner.beta, learner.passive, learner.live, known > 0.0))


def model_snapshot(learner: RlsLearner) -> ModelSnapshot | None:
    """The model as published; None before the first fit. A set with columns free of sign lists no features."""
    if not learner.started:
        return None
    found = diagnosis_of(learner)
    steps = float(learner.sums[-1])
    live = learner.fast.beta if learner.champion == FAST else learner.beta
    features = [
        FeatureSnapshot(
            name=column.name,
            unit=column.unit,
            coefficient=float(learner.beta[j]),
            status=found.status[j],
            stderr=float(found.stderr[j]),
            live_coefficient=float(live[j]),
            learned_share=float(found.share[j]),
            excitation=_finite(found.excitation[j]),
            vif=_finite(found.vif[j]),
            mean=float(learner.sums[j] / steps) if steps > 0.0 else None,
        )
        for j, column in enumerate(learner.features.columns)
        if learner.live[j] and not learner.signed
    ]
    return ModelSnapshot(
        features=features,
        rows=learner.rows,
        effective_rows=learner.effective_rows(),
        condition_number=found.condition,
        error=learner.error.snapshot(),
        live_error=learner.live_error.snapshot(),
        scale=float(learner.scale[SLOW]),
    )


def donation(learner: RlsLearner) -> Prior | None:
    """What another configuration may start from; None before the first fit."""
    if not learner.started:
        return None
    if learner.holding:
        g = learner.statistics()
        return Prior.of_donor(learner.beta, g.diagonal()[: learner.p] / max(1.0, learner.effective_rows()))
    return Prior.of_donor(learner.beta, learner.per_row)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
