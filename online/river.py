"""River's models: what corrects the published prediction, regressors that learn beside ``rls``, detectors of change.

Importing this module imports River, which takes 70 MB and 0.7 s of CPU, mostly scipy's statistics: only who configures
a model of River's imports it, with the first row (online/target/settings.py).

``river:residual``: River's linear regression on what the level leaves, from columns that no coefficient is about.

    e_i = log(y_i / (x_i beta F exp(c_i)))       c: the level (online/level.py)
    d_i = clip(w . scaled(u_i) + w0, -0.25, 0.25)                 published: x beta F exp(c + d) while it wins
    scaled, w, w0: StandardScaler, then LinearRegression(SGD(0.01), Huber(0.05)), River's own, ``predict_one`` then
    ``learn_one``

u: per step, how many requests wait, are preempted, finish, run without being scheduled; the KV usage; blocks offloaded,
restored, evicted; 0 where it is not known. It wins while the discounted error of all rows with d is below the one
without.

It sees at most 32 rows per second of event time, evenly spaced in each block, so that its cost does not grow with the
load and a long step is seen no more often than a short one. Of the rows between, d of the last that it saw stands.

Guarantee: d is finite and within the bounds of the level. The loss was chosen on the recordings c0, c1, c3, c5, c9 and
p1. Merging: gradient steps do not add, so the model starts over; counts of rows add.

``river:<dotted name>``: a regressor of River beside ``rls``, e.g. ``river:tree.HoeffdingTreeRegressor``. It sees as
many rows, each a dict of per-step features x / l with a relative target behind a StandardScaler

    t = clip(y / (l m) - 1, -1, 10)          m: median of y / l of the first block; prediction = l m (1 + t^)

because River's models diverge or crawl on raw microseconds with outliers, and a median is the unit that stalls do not
move. It has River's defaults, publishes its error alone, is no champion, and starts over with the process.

Guarantee: predictions are finite and within [0, 11 l m]; a model that raises or predicts a non-finite value is replaced
by a fresh one. Reference: Montiel et al., River (JMLR 2021).
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
from river import base, drift, linear_model, optim, preprocessing

from .blocks import Design, median_of
from .constants import NOISE_ROWS, VALUE_MAX
from .errors import RATIO_MAX, Contest, PrequentialError
from .features import FeatureSet
from .level import LEVEL_MAX
from .rows import STEP_FEATURES, Floats, Ints, RowBlock
from .snapshot import CorrectionSnapshot, ModelSnapshot
from .state import Stateful, Tree

# Guard: cost; rows per second of event time that each model sees of a target.
ROWS_PER_S = 32.0


_NAMES = ("waiting", "preempted", "finished", "kv_usage_ratio", "offload_blocks", "restore_blocks", "evicted_blocks")
CONTEXT = (*_NAMES, "idle")
"""Columns u: raw ones, and requests that run without being scheduled."""


def context_of(rows: RowBlock) -> Floats:
    """Columns u of each row, per step, (n, 8); what is not known is 0."""
    known = np.clip(np.nan_to_num(rows.raw), 0.0, VALUE_MAX)
    raw = dict(zip(STEP_FEATURES, known.T, strict=True))
    lines = [*[raw[name] for name in _NAMES], np.maximum(raw["running"] - raw["requests"], 0.0)]
    per_row: Floats = np.add.reduceat(np.column_stack(lines), rows.offsets[:-1]) / rows.steps[:, None]
    return per_row


class RateLimit(Stateful):
    """Which rows a River model sees: so many per second of event time at most, evenly spaced in each block.

    Not the rows that cross a fixed time: the longer a row, the likelier it is to be one.

    Attributes:
        last_ns: end of the last block; 0 before the first.
        may_see: rows that are left over for the next block; what a second allows at most.
    """

    SAVED = ("last_ns", "may_see")

    def __init__(self) -> None:
        self.last_ns, self.may_see = 0, 0.0

    def pick(self, end_ns: Ints) -> Ints:
        """Indices of the rows that are seen, of a block of rows that end at these times, (n,), n > 0."""
        n, last_ns = len(end_ns), int(end_ns.max())
        spent_s = max(0.0, (last_ns - (self.last_ns or int(end_ns.min()))) / 1e9)
        self.last_ns = last_ns
        self.may_see = min(self.may_see + spent_s * ROWS_PER_S, ROWS_PER_S)
        k = min(n, int(self.may_see))
        self.may_see -= k
        return (np.arange(k) * n + n // 2) // max(k, 1)


class Regression(Stateful):
    """River's scaler and linear regression on the columns u.

    What is saved: rows, means and variances that the scaler knows, weights and intercept of the regression, (8,) each.
    """

    SAVED = ("rows", "means", "variances", "weights", "intercept")

    def __init__(self) -> None:
        self.scaler = preprocessing.StandardScaler()
        self.linear = linear_model.LinearRegression(loss=optim.losses.Huber(0.05))

    def learn(self, u: Floats, e: Floats) -> Floats:
        """D of each row u, (n, 8), before it is learned with its e, (n,); not finite from where it diverged."""
        predicted = np.empty(len(u))
        for i, (row, y) in enumerate(zip(u.tolist(), np.clip(e, -1.0, 1.0).tolist(), strict=True)):
            named = dict(zip(CONTEXT, row, strict=True))
            self.scaler.learn_one(named)  # a row's context is known before its time
            scaled = self.scaler.transform_one(named)
            predicted[i] = self.linear.predict_one(scaled)
            self.linear.learn_one(scaled, y)
        return predicted

    def to_state(self) -> Tree:
        """See Stateful."""
        columns = (self.scaler.counts, self.scaler.means, self.scaler.vars, self.linear.weights)
        arrays = (np.array([float(each.get(name, 0.0)) for name in CONTEXT]) for each in columns)
        return dict(zip(self.SAVED, (*arrays, float(self.linear.intercept)), strict=True))

    def from_state(self, state: Tree) -> None:
        """See Stateful.

        River's weights cannot be set: they are 0 less one step of rate 1 along the gradient -1 times the row.
        """
        self.rows = self.means = self.variances = self.weights = np.zeros(len(CONTEXT))
        self.intercept = 0.0
        super().from_state(state)
        known = (dict(zip(CONTEXT, getattr(self, name).tolist(), strict=True)) for name in self.SAVED[:4])
        rows, means, variances, weights = known
        for into, values in ((self.scaler.counts, rows), (self.scaler.means, means), (self.scaler.vars, variances)):
            into.update(values)
        fresh = self.linear
        self.linear = linear_model.LinearRegression(
            optim.SGD(1.0), optim.losses.Absolute(), intercept_init=self.intercept, intercept_lr=0.0
        )
        self.linear.learn_one(weights, math.inf)
        self.linear.optimizer, self.linear.loss = fresh.optimizer, fresh.loss
        self.linear.intercept_lr = fresh.intercept_lr


class ResidualModel(Stateful):
    """What River's regression adds to the published prediction of one target.

    Attributes:
        learned, passed: rows seen in all, and rows between them.
        last_value: d of the last row that was seen.
        contest: between 0, as if it added nothing, and d.
    """

    SAVED = ("learned", "passed", "rate_limit", "last_value", "contest", "model")

    def __init__(self) -> None:
        self.learned = self.passed = 0
        self.rate_limit = RateLimit()
        self._start_over()

    def _start_over(self) -> None:
        self.last_value, self.model, self.contest = 0.0, Regression(), Contest(2)

    @property
    def active(self) -> bool:
        """Whether d is part of what is published."""
        return self.contest.best() == 1

    def learn(self, rows: RowBlock, left: Floats) -> Floats:
        """Rows and their e, (n,); d of each by what was known before it, (n,)."""
        seen, values = self.rate_limit.pick(rows.end_ns), np.array([self.last_value])
        if len(seen):
            shown = rows.take(seen)
            values = np.append(values, self.model.learn(context_of(shown), left[seen]))
            if not np.isfinite(values).all():
                self._start_over()
                values = np.nan_to_num(values, posinf=0.0, neginf=0.0)
        values = np.clip(values, -LEVEL_MAX, LEVEL_MAX)
        self.last_value = float(values[-1])
        added = np.repeat(values, np.diff(seen, prepend=0, append=len(left)))
        published = added if self.active else np.zeros_like(added)
        self.contest.learn(np.stack((np.zeros_like(added), added)), left, len(seen) / len(left))
        self.learned += len(seen)
        self.passed += len(left) - len(seen)
        return published

    def snapshot(self) -> CorrectionSnapshot:
        """What it adds to the published prediction now."""
        rows = {"learned": self.learned, "thinned": self.passed}
        factor = math.exp(self.last_value) if self.active else 1.0
        return CorrectionSnapshot(learner="river:residual", active=self.active, factor=factor, rows=rows)

    def add(self, other: ResidualModel) -> None:
        """Count the rows of both and start over."""
        self.learned += other.learned
        self.passed += other.passed
        self._start_over()


def make_regressor(dotted: str) -> Any:
    """A fresh regressor of River's, by its name below ``river``.

    Raises:
        ValueError: if there is no such class in River, it is not a regressor or needs arguments.
    """
    module, _, class_name = dotted.rpartition(".")
    try:
        model = getattr(importlib.import_module(f"river.{module}"), class_name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"river has no {dotted!r} that needs no arguments ({error})") from error
    if not isinstance(model, base.Regressor):
        raise ValueError(f"{dotted!r} is not a regressor")  # noqa: TRY004  a configuration error
    return preprocessing.StandardScaler() | model


class RiverLearner:
    """One River regressor on one feature set of one target."""

    def __init__(self, dotted: str, features: FeatureSet) -> None:
        self.dotted, self.features = dotted, features
        self.model = make_regressor(dotted)
        self.rate_limit, self.error = RateLimit(), PrequentialError()
        self.median_us, self.rows = 0.0, 0

    @property
    def started(self) -> bool:
        """Whether a prediction means anything yet."""
        return self.rows >= NOISE_ROWS

    def learn(self, block: Design) -> None:
        """Predict, score and learn each row of the block that is seen."""
        per_step = block.elapsed_us / block.steps
        if self.median_us == 0.0:
            self.median_us = median_of(per_step)
        for i in self.rate_limit.pick(block.end_ns).tolist():
            row = dict(zip(self.features.names, (block.x[i] / block.steps[i]).tolist(), strict=True))
            relative = float(per_step[i]) / self.median_us
            predicted = 1.0 + self._predict_and_learn(row, _bounded(relative - 1.0))
            if self.started:
                self.error.learn(np.array([abs(predicted / relative - 1.0)]))
            self.rows += 1

    def _predict_and_learn(self, row: dict[str, float], t: float) -> float:
        """What the model says of a row before it learns it; 0, and a fresh model, where it fails or is not finite."""
        try:
            predicted = float(self.model.predict_one(row) or 0.0)
            self.model.learn_one(row, t)
        except (ArithmeticError, ValueError, TypeError, LookupError):
            predicted = math.nan
        if not math.isfinite(predicted):
            self.model, predicted = make_regressor(self.dotted), 0.0
        return _bounded(predicted)

    def snapshot(self) -> ModelSnapshot | None:
        """Rows and error; its weights are in moving units and mean nothing on their own, so they are not listed."""
        if not self.started:
            return None
        return ModelSnapshot(features=[], rows=self.rows, effective_rows=float(self.rows), error=self.error.snapshot())


def _bounded(relative: float) -> float:
    """A prediction is within 0 and 11 times the median."""
    return min(max(relative, -1.0), RATIO_MAX)


def make_detector(name: str) -> Any:
    """A fresh one by its name in ``online.change.DETECTORS``, for values of about unit scale."""
    return {
        "adwin": drift.ADWIN(clock=1),  # asked with each value; with River's own threshold
        # With River's 0.005 and 50, made for other units, it finds 2 of 10 changes of prefill within 1,500 rows of
        # tests/bench/learning_drift.py; with these it finds all.
        "page_hinkley": drift.PageHinkley(delta=0.5, threshold=20.0),
    }[name]
