"""River's models: what corrects the published prediction, and regressors that learn beside ``rls``.

``river:residual``: River's linear regression on what the level leaves, from columns that no coefficient is about.

    e_i = log(y_i / (x_i beta F exp(c_i)))       c: the level (online/level.py)
    d_i = clip(w . scaled(u_i) + w0, -0.15, 0.15)                 published: x beta F exp(c + d) while it wins
    StandardScaler, then LinearRegression(SGD(0.01), Huber(0.05))     River's own, ``predict_one`` then ``learn_one``

u: per step, how many requests wait, are preempted, finish, run without being scheduled; the KV usage; blocks offloaded,
restored, evicted; 0 where it is not known. It wins while the discounted error of all rows with d is below the one
without (half-life: 128 rows that it sees, each error at most 0.5), after 128 rows that it saw.

It sees at most 32 rows per second of event time, evenly spaced in each block, so that its cost does not grow with the
load and a long step is seen no more often than a short one. Of the rows between, d of the last that it saw stands.

Guarantee: d is finite and within its bounds. The loss, the rate of SGD and the bounds were chosen on the recordings c0,
c1, c3, c5, c9 and p1. Merging: gradient steps do not add, so the model starts over; counts of rows add.
Reference: Montiel et al., River (JMLR 2021).

``river:<dotted name>``: a regressor of River beside ``rls``, e.g. ``river:tree.HoeffdingTreeRegressor``.

It sees rows one at a time, at most so many per second of event time, as a dict of per-step features x / l and a
relative target behind a StandardScaler

    t = clip(y / (l m) - 1, -1, 10)          m: median of y / l of the first block; prediction = l m (1 + t^)

because River's models diverge or crawl on raw microseconds with outliers, and a median is the unit that stalls do not
move. It has River's defaults, publishes its error alone, is no champion, and starts over with the process.

Guarantee: predictions are finite and within [0, 11 l m]; a model that raises or predicts a non-finite value is replaced
by a fresh one. Reference: Montiel et al., River (JMLR 2021).
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from online.blocks import Design, median_of
from online.constants import ERROR_MAX, NOISE_ROWS, VALUE_MAX
from online.errors import PrequentialError
from online.features import INTERCEPT, Column, FeatureSet, Raw
from online.level import MEMORY_ROWS
from online.rows import CorrectionOutcome, Floats, Ints, Target
from online.snapshot import CorrectionSnapshot, ModelSnapshot
from online.state import Stateful, Tree

RESIDUAL = "river:residual"
# Chosen: on the recordings c0, c1, c3, c5, c9 and p1.
RESIDUAL_MAX = 0.15
# Chosen: on the recordings c0, c1, c3, c5, c9 and p1.
_RATE, _THRESHOLD = 0.01, 0.05


def _context() -> FeatureSet:
    """Columns u: raw ones, and requests that run without being scheduled; what is not known is 0."""

    def bounded(values: Floats) -> Floats:
        return np.fmin(np.fmax(values, 0.0), VALUE_MAX)

    def raw_column(name: str) -> Column:
        return Column(name, "", lambda raw: bounded(raw[name]))

    def idle(raw: Raw) -> Floats:
        return bounded(bounded(raw["running"]) - bounded(raw["requests"]))

    names = ("waiting", "preempted", "finished", "kv_usage_ratio", "offload_blocks", "restore_blocks", "evicted_blocks")
    return FeatureSet("context", Target.STEP_TIME, (*map(raw_column, names), Column("idle", "", idle)))


CONTEXT = _context()


@dataclass(slots=True)
class ModelState(Stateful):
    """What scaler and regression know: rows, weight, mean and variance by column, (8,), and the intercept."""

    SAVED = ("rows", "weights", "means", "variances", "intercept")

    rows: int = 0
    weights: Floats = field(default_factory=lambda: np.zeros(len(CONTEXT)))
    means: Floats = field(default_factory=lambda: np.zeros(len(CONTEXT)))
    variances: Floats = field(default_factory=lambda: np.zeros(len(CONTEXT)))
    intercept: float = 0.0


def make_model(state: ModelState | None = None) -> tuple[Any, Any]:
    """Scaler and regression, fresh or as they were."""
    from river import linear_model, optim, preprocessing  # noqa: PLC0415 -- only who learns by it pays for its import

    def regression(rate: float, loss: Any, **more: float) -> Any:
        return linear_model.LinearRegression(optimizer=optim.SGD(rate), loss=loss, **more)

    scaler, linear = preprocessing.StandardScaler(), regression(_RATE, optim.losses.Huber(_THRESHOLD))
    if state is not None:
        weights, means, variances = (
            dict(zip(CONTEXT.names, each.tolist(), strict=True))
            for each in (state.weights, state.means, state.variances)
        )
        scaler.counts.update(dict.fromkeys(CONTEXT.names, state.rows))
        scaler.means.update(means)
        scaler.vars.update(variances)
        # River's weights cannot be set. They are 0 less one step of rate 1 along the gradient -1 times the row.
        fresh, linear = linear, regression(1.0, optim.losses.Absolute(), intercept_init=state.intercept, intercept_lr=0)
        linear.learn_one(weights, math.inf)
        linear.optimizer, linear.loss, linear.intercept_lr = fresh.optimizer, fresh.loss, fresh.intercept_lr
    return scaler, linear


class Thinning(Stateful):
    """Which rows a River model sees: so many per second of event time at most, evenly spaced in each block.

    Not the rows that cross a fixed time: the longer a row, the likelier it is to be one.

    Args:
        rows_per_s: rows seen per second of event time, at most.

    Attributes:
        last_ns: end of the last block; 0 before the first.
        may_see: rows that are left over for the next block; what a second allows at most.
    """

    SAVED = ("last_ns", "may_see")

    __slots__ = ("_rows_per_s", "last_ns", "may_see")

    def __init__(self, rows_per_s: float) -> None:
        self._rows_per_s = rows_per_s
        self.last_ns, self.may_see = 0, 0.0

    def pick(self, end_ns: Ints) -> Ints:
        """Indices of the rows that are seen, of a block of rows that end at these times, (n,), n > 0."""
        n, last_ns = len(end_ns), int(end_ns.max())
        since_ns = self.last_ns or int(end_ns.min())
        spent_s, self.last_ns = max(0.0, (last_ns - since_ns) / 1e9), last_ns
        self.may_see = min(self.may_see + spent_s * self._rows_per_s, max(self._rows_per_s, 1.0))
        k = min(n, int(self.may_see))
        self.may_see -= k
        return (np.arange(k) * n + n // 2) // max(k, 1)


class ResidualModel(Stateful):
    """Of the published prediction of one target.

    Attributes:
        learned, passed: rows that it saw, and rows between them.
        active: whether d is part of what is published.
        seen_rows: that the model has learned.
        standing: d of the last row that was seen.
        errors: discounted, with d and without, (2,).
    """

    SAVED = ("learned", "passed", "thinning", "active", "seen_rows", "standing", "errors")

    def __init__(self, rows_per_s: float) -> None:
        self.learned = self.passed = 0
        self.thinning = Thinning(rows_per_s)
        self._start_over()

    def _start_over(self) -> None:
        self.active, self.seen_rows, self.standing, self.errors = False, 0, 0.0, np.zeros(2)
        self._river: tuple[Any, Any] | None = None
        self._state: ModelState | None = None

    @property
    def model(self) -> ModelState | None:
        """For the state file; None before the first row. River is imported with the first row, not with a state."""
        if self._river is None:
            return self._state
        scaler, linear = self._river
        weights, names = linear.weights, CONTEXT.names
        weights, means, variances = (
            np.array([each[name] for name in names], np.float64) for each in (weights, scaler.means, scaler.vars)
        )
        return ModelState(scaler.counts[names[0]], weights, means, variances, float(linear.intercept))

    def to_state(self) -> Tree:
        """See Stateful."""
        model = self.model
        return super().to_state() | {"model": None if model is None else model.to_state()}

    def from_state(self, state: Tree) -> None:
        """See Stateful."""
        super().from_state(state)
        self._river, self._state = None, None
        if state["model"] is not None:
            self._state = ModelState()
            self._state.from_state(state["model"])

    def learn(self, context: Floats, left: Floats, end_ns: Ints) -> Floats:
        """Rows u (n, 8), e (n,) and their ends; d of each by what was known before it, (n,)."""
        seen = self.thinning.pick(end_ns)
        self.learned += len(seen)
        self.passed += len(left) - len(seen)
        standing = [self.standing]
        for row, e in zip(context[seen].tolist(), left[seen].tolist(), strict=True):
            standing.append(self._learn_one(dict(zip(CONTEXT.names, row, strict=True)), e))
        self.standing = standing[-1]
        added = np.repeat(standing, np.diff(seen, prepend=0, append=len(left)))
        published = added if self.active else np.zeros_like(added)
        self._judge(added, left, len(seen))
        return published

    def _judge(self, added: Floats, left: Floats, seen_rows: int) -> None:
        """Whether the next rows are corrected: by the mean error of all rows, the ones between seen ones included."""
        errors = np.minimum(np.abs(np.expm1(np.stack((added, np.zeros_like(added))) - left)), ERROR_MAX)
        self.errors = self.errors * 0.5 ** (seen_rows / MEMORY_ROWS) + seen_rows * errors.mean(axis=1)
        self.seen_rows += seen_rows
        self.active = self.seen_rows >= MEMORY_ROWS and bool(self.errors[0] < self.errors[1])

    def _learn_one(self, row: dict[str, float], e: float) -> float:
        """D of a row, before it is learned."""
        if self._river is None:
            self._river = make_model(self._state)
        scaler, linear = self._river
        scaler.learn_one(row)  # a row's context is known before its time
        scaled = scaler.transform_one(row)
        d = float(linear.predict_one(scaled))
        if not math.isfinite(d):
            self._start_over()
            return 0.0
        linear.learn_one(scaled, min(max(e, -1.0), 1.0))
        return min(max(d, -RESIDUAL_MAX), RESIDUAL_MAX)

    def snapshot(self) -> CorrectionSnapshot:
        """What it adds to the published prediction now."""
        rows = {CorrectionOutcome.LEARNED.value: self.learned, CorrectionOutcome.THINNED.value: self.passed}
        factor = math.exp(self.standing) if self.active else 1.0
        return CorrectionSnapshot(learner=RESIDUAL, active=self.active, factor=factor, rows=rows)

    def add(self, other: ResidualModel) -> None:
        """Count the rows of both and start over."""
        self.learned += other.learned
        self.passed += other.passed
        self._start_over()


PREFIX = "river:"
# Guard: a prediction is within 0 and 11 times the median.
_LOW, _HIGH = -1.0, 10.0


def make(name: str) -> Any:
    """A fresh regressor for ``river:<dotted name>``.

    Raises:
        ValueError: if there is no such class in River, it is not a regressor or needs arguments.
    """
    dotted = name.removeprefix(PREFIX)
    module, _, class_name = dotted.rpartition(".")
    base, preprocessing = importlib.import_module("river.base"), importlib.import_module("river.preprocessing")
    try:
        model = getattr(importlib.import_module(f"river.{module}"), class_name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"learner {name!r}: river has no {dotted!r} that needs no arguments ({error})") from error
    if not isinstance(model, base.Regressor):
        raise ValueError(f"learner {name!r}: {dotted!r} is not a regressor")  # noqa: TRY004  a configuration error
    return preprocessing.StandardScaler() | model


class RiverLearner:
    """One River regressor on one feature set of one target."""

    def __init__(self, name: str, features: FeatureSet, rows_per_s: float) -> None:
        self.name, self.features = name, features
        self.model: Any = None
        self.thinning, self.error = Thinning(rows_per_s), PrequentialError()
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
        for i in self.thinning.pick(block.end_ns).tolist():
            row, y = self._row(block.x[i] / block.steps[i]), float(per_step[i])
            predicted = self.median_us * (1.0 + self._predict_one(row))
            if self.started:
                self.error.learn(np.array([abs(predicted - y) / y]))
            self._try(lambda row=row, y=y: self.model.learn_one(row, min(max(y / self.median_us - 1.0, _LOW), _HIGH)))
            self.rows += 1

    def predict(self, block: Design) -> Floats:
        """Predict a block, (n,) us."""
        relative = [self._predict_one(self._row(x)) for x in block.x / block.steps[:, None]]
        return self.median_us * block.steps * (1.0 + np.array(relative))

    def _row(self, x: Floats) -> dict[str, float]:
        """A row (p,) as River likes it; the intercept is the model's own."""
        pairs = zip(self.features.names, x.tolist(), strict=True)
        return {name: value for name, value in pairs if name != INTERCEPT}

    def _predict_one(self, row: dict[str, float]) -> float:
        """The relative prediction within its bounds, 0 where there is none."""
        predicted = self._try(lambda: self.model.predict_one(row))
        return min(max(predicted, _LOW), _HIGH)

    def _try(self, ask: Any) -> float:
        """What the model answers; 0, and a fresh model, where it fails or is not finite."""
        try:
            if self.model is None:
                self.model = make(self.name)
            answer = float(ask() or 0.0)
        except (ArithmeticError, ValueError, TypeError, LookupError):
            answer = math.nan
        if not math.isfinite(answer):
            self.model, answer = make(self.name), 0.0
        return answer

    def snapshot(self) -> ModelSnapshot | None:
        """Rows and error; its weights are in moving units and mean nothing on their own, so they are not listed."""
        if not self.started:
            return None
        return ModelSnapshot(features=[], rows=self.rows, effective_rows=float(self.rows), error=self.error.snapshot())
