"""Systems learned: on a recording, frozen at the cut, and prequential over all of it.

The learner is the bank's default, fed in blocks of 32 rows; what is scored after the cut are the published
coefficients, which then learn nothing more. The prequential pass is a live target: blocks of its sizes, and the one
watch for changes of speed that all of its models share. Rows in which a system does not know a column are scored by
nobody of that system, and counted.

``SYSTEM × shape`` multiplies a prediction by the factor of each row's batch shape. ``SYSTEM × tree`` multiplies it by
what River's Hoeffding tree, with linear models in its leaves, learns of log(y / x beta) from the columns per step: the
residual tree that reviewers of PICF ask for, and the gate of MoLE-RD learned instead of given.

Reference: Domingos and Hulten, Mining high-speed data streams (KDD 2000).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from collector.config import Config
from collector.identity import Fact
from online import Design, Floats, Ints, Mask, RowBlock, Target, strata_of, stratum_name
from online.features import PORTABLE, SYSTEMS, FeatureSet, build
from online.rls import Prior, RlsLearner
from online.target import TargetState

BLOCK_ROWS = 32
RANK_TOLERANCE = 1e-3
SHAPE_SUFFIX, TREE_SUFFIX = " × shape", " × tree"
NINE = (PORTABLE, *SYSTEMS)
"""The systems of the sources, in the order of tables."""


Score = dict[str, Any]
"""What one model or system scores: its name, and ratios by figure; None = cannot be said."""

LogFactor = Callable[[RowBlock], Floats]
Bands = Callable[[RowBlock], tuple[Floats, Floats]]


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients (p,) of one system for one target, of rows that excite so many directions of its columns.

    ``log_factor``: of rows, (n,), the log of what the prediction is multiplied by. ``bands``: 10th and 90th percentile
    of observed / predicted for each row, (n,) each.
    """

    system: str
    features: FeatureSet
    beta: Floats
    identifiable: int = 0
    log_factor: LogFactor | None = None
    bands: Bands | None = None

    @property
    def columns(self) -> int:
        """Columns of the live set."""
        return len(self.features)

    def predict(self, rows: RowBlock) -> Floats:
        """Microseconds per row, (n,); NaN where a column is not known."""
        with np.errstate(invalid="ignore", over="ignore"):
            x = self.features.evaluate(rows)
            known = np.isfinite(x).all(axis=1)
            prediction = np.full(len(rows), np.nan)
            prediction[known] = x[known] @ self.beta
        return prediction if self.log_factor is None else prediction * np.exp(self.log_factor(rows))


def design(features: FeatureSet, rows: RowBlock) -> Design:
    """Rows as the learner takes them; those with an unknown column left out."""
    x = features.evaluate(rows)
    stratum, cell = strata_of(features.target, rows)
    steps = rows.steps.astype(np.float64)
    whole = Design(x, rows.phase, rows.elapsed_us, steps, rows.weight, stratum, cell, rows.end_ns)
    known = _known(x, rows)
    return whole if known.all() else whole.take(known)


def _known(x: Floats, rows: RowBlock) -> Mask:
    return np.asarray(np.isfinite(x).all(axis=1) & np.isfinite(rows.elapsed_us) & (rows.elapsed_us > 0.0))


def learn(features: FeatureSet, rows: RowBlock, prior: Prior | None = None) -> RlsLearner | None:
    """A learner fed with all rows; None when they were too few to begin."""
    learner, known = RlsLearner(features, prior), design(features, rows)
    for start in range(0, len(known), BLOCK_ROWS):
        learner.learn(known.slice(start, min(start + BLOCK_ROWS, len(known))))
    return learner if learner.started else None


def predict(learner: RlsLearner, features: FeatureSet, rows: RowBlock, *, shaped: bool = False) -> Floats:
    """By the published coefficients; ``shaped``: times the factor of the row's batch shape."""
    log_factor = _shape_factors(learner, features) if shaped else None
    return Fit("", features, learner.fit.beta[: len(features)], log_factor=log_factor).predict(rows)


def _shape_factors(learner: RlsLearner, features: FeatureSet) -> LogFactor:
    return lambda rows: learner.log_factors(strata_of(features.target, rows)[1])


def _published_bands(learner: RlsLearner, features: FeatureSet) -> Bands | None:
    """Those of each row's stratum."""
    published = learner.intervals.snapshot()
    if published is None:
        return None
    pooled = (published.p10, published.p50, published.p90)

    def bands(rows: RowBlock) -> tuple[Floats, Floats]:
        names = [stratum_name(int(stratum)) for stratum in strata_of(features.target, rows)[0]]
        found = np.array([published.strata.get(name, pooled) for name in names]).reshape(-1, 3)
        return found[:, 0], found[:, 2]

    return bands


def _residual_tree(learner: RlsLearner, features: FeatureSet, rows: RowBlock) -> LogFactor:
    """River's tree on what the coefficients leave of rows; its log factor, (n,), of others."""
    from river import preprocessing, tree  # noqa: PLC0415 - a second to import

    def told(rows: RowBlock) -> list[dict[str, float]]:
        per_step = np.nan_to_num(features.evaluate(rows) / rows.steps[:, None])
        return [dict(zip(features.names, each, strict=True)) for each in per_step.tolist()]

    model = preprocessing.StandardScaler() | tree.HoeffdingTreeRegressor()
    left = np.log(rows.elapsed_us / np.maximum(predict(learner, features, rows), 1e-3 * rows.elapsed_us))
    for each, target in zip(told(rows), left.tolist(), strict=True):
        if np.isfinite(target):
            model.learn_one(each, target)
    bound = float(np.nanmax(np.abs(left)))
    return lambda rows: np.clip([model.predict_one(each) for each in told(rows)], -bound, bound)


def build_set(system: str, target: Target, facts: dict[str, Fact]) -> FeatureSet | None:
    """Columns of a system; None where it does not apply."""
    plain = plain_name(system)
    return build(plain, target, facts) if plain == system or target.vector == "beta" else None


def plain_name(system: str) -> str:
    """Without what its prediction is multiplied by."""
    return system.removesuffix(SHAPE_SUFFIX).removesuffix(TREE_SUFFIX)


def fit(system: str, target: Target, facts: dict[str, Fact], rows: RowBlock) -> Fit | None:
    """A system learned on rows; None where it does not apply or could not begin."""
    features = build_set(system, target, facts)
    model = None if features is None or len(rows) == 0 else learn(features, rows)
    if features is None or model is None:
        return None
    log_factor, bands = None, None
    if system.endswith(SHAPE_SUFFIX):
        log_factor = _shape_factors(model, features)
    elif system.endswith(TREE_SUFFIX):
        log_factor = _residual_tree(model, features, rows)
    else:  # bands are of the coefficients alone
        bands = _published_bands(model, features)
    beta = model.fit.beta[: len(features)]
    return Fit(system, features, beta, identifiable(features, rows), log_factor, bands)


def identifiable(features: FeatureSet, rows: RowBlock) -> int:
    """How many directions of the columns the rows excite: rank of the scaled columns, in relative units."""
    x = features.evaluate(rows)
    x = x[np.isfinite(x).all(axis=1)]
    scale = np.sqrt((x * x).sum(axis=0))
    if not scale.any():
        return 0
    values = np.linalg.svd(x[:, scale > 0.0] / scale[scale > 0.0], compute_uv=False)
    return int(np.count_nonzero(values > RANK_TOLERANCE * values[0]))


def ape(prediction_us: Floats, elapsed_us: Floats) -> Floats:
    """Absolute relative errors of what was predicted at all."""
    known = np.isfinite(prediction_us)
    return np.asarray(np.abs(prediction_us[known] - elapsed_us[known]) / elapsed_us[known])


class Ahead(NamedTuple):
    """Rows of one block by number, and what a live target predicted of them before it learned the block, (n,) each."""

    numbers: Ints
    block: Design
    predicted_us: Floats
    log_factor: Floats
    """Of the batch shape."""


def predict_ahead(watching: FeatureSet, features: FeatureSet, rows: RowBlock) -> Iterator[Ahead]:
    """Each block before it is learned; ``watching`` looks out for changes of speed, as ``portable`` does live."""
    state = TargetState(features.target, Config(learners=("rls",)))
    for each in (watching, features):
        state.offer(each)
    learner = {model.features.name: model for model in state.models.values()}[features.name]
    known = _known(features.evaluate(rows), rows)
    for start in range(0, len(rows), BLOCK_ROWS):
        part = rows.slice(start, min(start + BLOCK_ROWS, len(rows)))
        block = design(features, part)
        if not learner.holding and len(block):
            numbers = start + np.flatnonzero(known[start : start + BLOCK_ROWS])
            yield Ahead(numbers, block, learner.predict(block), learner.log_factors(block.cell))
        state.learn(part)


def prequential(system: str, facts: dict[str, Fact], rows: RowBlock) -> float | None:
    """Mean error of all rows but the first 256, each predicted by what a live target has learned before its block.

    Nothing is said of trees: no target learns them.
    """
    features, watching = (build_set(each, Target.STEP_TIME, facts) for each in (system, PORTABLE))
    if features is None or watching is None or system.endswith(TREE_SUFFIX):
        return None
    is_shaped = float(system.endswith(SHAPE_SUFFIX))
    errors = [
        np.abs(each.predicted_us * np.exp(is_shaped * each.log_factor) / each.block.elapsed_us - 1.0)
        for each in predict_ahead(watching, features, rows)
    ]
    return float(np.concatenate(errors).mean()) if errors else None
