"""Systems learned on a recording, and frozen at the cut.

The learner is the bank's default, fed in blocks of 32 rows; what is scored after the cut are the published
coefficients, which then learn nothing more. Rows in which a system does not know a column are not scored of it.

``SYSTEM × shape`` multiplies a prediction by the factor of each row's batch shape. ``SYSTEM × tree`` multiplies it by
what River's Hoeffding tree, with linear models in its leaves, learns of log(y / x beta) from the columns per step: the
residual tree that reviewers of PICF ask for, and the gate of MoLE-RD learned instead of given.

Reference: Domingos and Hulten, Mining high-speed data streams (KDD 2000).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from collector.identity import Fact
from online import Design, Floats, Ints, RowBlock, Target, strata_of, stratum_name
from online.features import PORTABLE, SYSTEMS, FeatureSet, build
from online.rls import Prior, RlsLearner

BLOCK_ROWS = 32
SHAPE_SUFFIX, TREE_SUFFIX = " × shape", " × tree"
NINE = (PORTABLE, *SYSTEMS)
"""The systems of the sources, in the order of tables."""

Document = dict[str, Any]
"""What is printed, and written as JSON."""
Score = Document
"""What one model or system scores: its name, and ratios by figure; None = cannot be said."""

LogFactor = Callable[[RowBlock], Floats]


def ape(prediction_us: Floats, elapsed_us: Floats) -> Floats:
    """Absolute relative errors of what was predicted at all."""
    known = np.isfinite(prediction_us)
    return np.asarray(np.abs(prediction_us[known] - elapsed_us[known]) / elapsed_us[known])


def mean(errors: Floats | list[float]) -> float | None:
    """Mean; None of no values."""
    return float(np.mean(errors)) if len(errors) else None


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients (p,) of one system for one target.

    ``learner``: who publishes them with bands. ``log_factor``: of rows, (n,), the log of what the prediction is
    multiplied by.
    """

    system: str
    features: FeatureSet
    beta: Floats
    learner: RlsLearner | None = None
    log_factor: LogFactor | None = None

    @staticmethod
    def of(learner: RlsLearner, system: str = "") -> Fit:
        """What a learner publishes."""
        return Fit(system, learner.features, learner.beta[: len(learner.features)], learner)

    def predict(self, rows: RowBlock) -> Floats:
        """Microseconds per row, (n,); NaN where a column is not known."""
        with np.errstate(invalid="ignore", over="ignore"):
            x = self.features.evaluate(rows)
            known = np.isfinite(x).all(axis=1)
            prediction = np.full(len(rows), np.nan)
            prediction[known] = x[known] @ self.beta
        return prediction if self.log_factor is None else prediction * np.exp(self.log_factor(rows))

    def bands(self, rows: RowBlock) -> tuple[Floats, Floats] | None:
        """10th and 90th percentile of observed / x beta in each row's stratum, (n,) each; None where none is known."""
        found = None if self.learner is None else self.learner.intervals.snapshot()
        if found is None:
            return None
        pooled = (found.p10, found.p50, found.p90)
        names = [stratum_name(int(stratum)) for stratum in strata_of(self.features.target, rows)[0]]
        low, _, high = np.array([found.strata.get(name, pooled) for name in names]).reshape(-1, 3).T
        return low, high


def design(features: FeatureSet, rows: RowBlock) -> tuple[Design, Ints]:
    """The design of rows, and the indices of its rows; rows with an unknown column are left out."""
    known = np.isfinite(features.evaluate(rows)).all(axis=1) & np.isfinite(rows.elapsed_us) & (rows.elapsed_us > 0.0)
    return Design.of(features, rows.take(known)), np.flatnonzero(known)


def learn(features: FeatureSet, rows: RowBlock, prior: Prior | None = None) -> RlsLearner | None:
    """A learner fed with all rows; None when they were too few to begin."""
    learner, (known, _) = RlsLearner(features, prior), design(features, rows)
    for start in range(0, len(known), BLOCK_ROWS):
        learner.learn(Design.of(features, known.slice(start, min(start + BLOCK_ROWS, len(known)))))
    return learner if learner.started else None


def plain_name(system: str) -> str:
    """Name of a system without the factor that multiplies its prediction."""
    return system.removesuffix(SHAPE_SUFFIX).removesuffix(TREE_SUFFIX)


def fit(system: str, target: Target, facts: dict[str, Fact], rows: RowBlock) -> Fit | None:
    """A system learned on rows; None where it does not apply or could not begin."""
    plain = plain_name(system)
    features = build(plain, target, facts) if plain == system or target.vector == "beta" else None
    learner = None if features is None else learn(features, rows)
    if learner is None:
        return None
    made = Fit.of(learner, system)
    if system.endswith(TREE_SUFFIX):
        return replace(made, log_factor=_residual_tree(made, rows), learner=None)
    if system.endswith(SHAPE_SUFFIX):
        return replace(made, log_factor=lambda of: learner.log_factors(strata_of(target, of)[1]), learner=None)
    return made


def _residual_tree(made: Fit, rows: RowBlock) -> LogFactor:
    """River's tree on what the coefficients leave of rows; its log factor, (n,), of others."""
    from river import preprocessing, tree  # noqa: PLC0415 - a second to import

    def per_step_columns(rows: RowBlock) -> list[dict[str, float]]:
        per_step = np.nan_to_num(made.features.evaluate(rows) / rows.steps[:, None])
        return [dict(zip(made.features.names, each, strict=True)) for each in per_step.tolist()]

    model = preprocessing.StandardScaler() | tree.HoeffdingTreeRegressor()
    left = np.log(rows.elapsed_us / np.maximum(made.predict(rows), 1e-3 * rows.elapsed_us))
    for each, target in zip(per_step_columns(rows), left.tolist(), strict=True):
        if np.isfinite(target):
            model.learn_one(each, target)
    bound = float(np.nanmax(np.abs(left)))
    return lambda rows: np.clip([model.predict_one(each) for each in per_step_columns(rows)], -bound, bound)
