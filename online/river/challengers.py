"""River's regressors behind the same contract: independent challengers, imported with the first row that one sees.

A challenger sees rows one at a time as a dict of per-step features x / l and a relative target

    t = clip(y / (l m) - 1, -1, 10)          m: median of y / l of the first block; prediction = l m (1 + t^)

because every River model that was tried diverges or crawls on raw microseconds with outliers: targets must be
winsorised, and a median is the unit that stalls do not move (second-order models behind a moving StandardScaler fail
outright).

    river:linear      StandardScaler | LinearRegression(SGD(0.01), Huber(0.1)): 1.5 to 4 % on simulated streams
    river:quantile    linear quantile models of 0.1, 0.5 and 0.9, pinball loss (online/river/quantile.py)
    river:<dotted>    any regressor below ``river``, with its defaults, e.g. river:tree.HoeffdingTreeRegressor

They see a bounded number of rows per second (online/river/thinning.py): what such a model costs per row is its own
affair. Row by row: ``learn_many`` needs a data frame library, and takes one step where learn_one takes one per row.

Guarantee: predictions are finite and within [0, 11 l m]; a model that raises or predicts a non-finite value is replaced
by a fresh one and the restart is counted. The linear ones are saved exactly; other models start over with the process.
Reference: Montiel et al., River (JMLR 2021).
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import msgspec
import numpy as np

from online.blocks import Design
from online.features import INTERCEPT, FeatureSet
from online.prediction import PrequentialError
from online.rls import middle
from online.rows import Floats
from online.snapshot import ModelSnapshot
from online.state import Count, Finite, saved

from .thinning import Thinning

PREFIX = "river:"
LINEAR, QUANTILE = "river:linear", "river:quantile"
_LOW, _HIGH = -1.0, 10.0
_START_ROWS = 32


def make(name: str) -> Any:
    """A fresh regressor for ``river:linear``, ``river:quantile`` or ``river:<dotted name>``.

    Raises:
        ValueError: if there is no such class in River, it is not a regressor or needs arguments.
    """
    preprocessing = importlib.import_module("river.preprocessing")
    if name == LINEAR:
        linear_model = importlib.import_module("river.linear_model")
        optim = importlib.import_module("river.optim")
        model = linear_model.LinearRegression(optimizer=optim.SGD(0.01), loss=optim.losses.Huber(0.1))
        return preprocessing.StandardScaler() | model
    if name.partition("@")[0] == QUANTILE:
        linear_model = importlib.import_module("river.linear_model")
        optim = importlib.import_module("river.optim")
        loss = optim.losses.Quantile(_tau(name))
        return preprocessing.StandardScaler() | linear_model.LinearRegression(optimizer=optim.SGD(0.01), loss=loss)
    dotted = name.removeprefix(PREFIX)
    module, _, class_name = dotted.rpartition(".")
    base = importlib.import_module("river.base")
    try:
        model = getattr(importlib.import_module(f"river.{module}"), class_name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"learner {name!r}: river has no {dotted!r} that needs no arguments ({error})") from error
    if not isinstance(model, base.Regressor):
        raise ValueError(f"learner {name!r}: {dotted!r} is not a regressor")  # noqa: TRY004  a configuration error
    return preprocessing.StandardScaler() | model


def _tau(name: str) -> float:
    """The quantile in ``river:quantile@0.1``; the median without one."""
    text = name.partition("@")[2]
    try:
        tau = float(text or "0.5")
    except ValueError:
        tau = math.nan
    if not 0.0 < tau < 1.0:
        raise ValueError(f"learner {name!r}: {text!r} is no quantile between 0 and 1")
    return tau


class LinearState(msgspec.Struct):
    """What a linear model and its scaler know."""

    counts: dict[str, int]
    means: dict[str, Finite]
    vars: dict[str, Finite]
    weights: dict[str, Finite]
    intercept: Finite
    iterations: int


class GuardedModel:
    """A guarded River model over rows of a feature set, made with the first row."""

    STATE = saved("river_model", linear=LinearState | None)

    def __init__(self, name: str, features: FeatureSet) -> None:
        self.name = name
        self._model: Any = None
        self._waiting: LinearState | None = None
        self.restarts = 0
        self._columns = [(j, c.name) for j, c in enumerate(features.columns) if c.name != INTERCEPT]

    @property
    def model(self) -> Any:
        """River's."""
        if self._model is None:
            self._model = make(self.name)
            if self._waiting is not None:
                _fill(self._model, self._waiting)
                self._waiting = None
        return self._model

    def rows(self, x: Floats) -> list[dict[str, float]]:
        """Rows (n, p) as River likes them; the intercept is the model's own."""
        names = [name for _, name in self._columns]
        return [dict(zip(names, row, strict=True)) for row in x[:, [j for j, _ in self._columns]].tolist()]

    def learn_one(self, row: dict[str, float], target: float) -> float:
        """Predict, then learn; the prediction, 0 if the model had to be replaced."""
        try:
            predicted = float(self.model.predict_one(row))
            self.model.learn_one(row, target)
        except (ArithmeticError, ValueError, TypeError, LookupError):
            predicted = math.nan
        if not math.isfinite(predicted):
            self._model = make(self.name)
            self.restarts += 1
            return 0.0
        return predicted

    def predict(self, x: Floats) -> Floats:
        """Predictions of rows (n, p), 0 where there is none."""
        predictions = []
        for row in self.rows(x):
            try:
                predicted = float(self.model.predict_one(row))
            except (ArithmeticError, ValueError, TypeError, LookupError):
                predicted = math.nan
            predictions.append(predicted if math.isfinite(predicted) else 0.0)
        return np.array(predictions)

    @property
    def is_saved(self) -> bool:
        """Whether it goes on after a restart."""
        return self.name == LINEAR

    @property
    def linear(self) -> LinearState | None:
        """Of a linear model, for the state file; None before its first row."""
        if self._model is None:
            return self._waiting
        scaler, linear = self.model["StandardScaler"], self.model["LinearRegression"]
        return LinearState(
            counts={k: int(v) for k, v in scaler.counts.items()},
            means={k: float(v) for k, v in scaler.means.items()},
            vars={k: float(v) for k, v in scaler.vars.items()},
            weights={k: float(v) for k, v in linear.weights.items()},
            intercept=float(linear.intercept),
            iterations=int(linear.optimizer.n_iterations),
        )

    @linear.setter
    def linear(self, state: LinearState | None) -> None:
        self._model, self._waiting = None, state


def _fill(model: Any, state: LinearState) -> None:
    """Continue a linear model from its state."""
    scaler, linear = model["StandardScaler"], model["LinearRegression"]
    scaler.counts.update(state.counts)
    scaler.means.update(state.means)
    scaler.vars.update(state.vars)
    linear._weights.update(state.weights)  # noqa: SLF001  river offers no other way in
    linear.intercept = state.intercept
    linear.optimizer.n_iterations = state.iterations


class RiverLearner:
    """One River regressor on one feature set of one target."""

    STATE = saved("river", inner=GuardedModel, thinning=Thinning, median_us=Finite, rows=Count, error=PrequentialError)

    publishes = False

    def __init__(self, name: str, features: FeatureSet, rows_per_s: float) -> None:
        self.features = features
        self.inner = GuardedModel(name, features)
        self.thinning = Thinning(rows_per_s)
        self.median_us = 0.0
        self.rows = 0
        self.error = PrequentialError()

    @property
    def is_saved(self) -> bool:
        """Whether it goes on after a restart; another starts over."""
        return self.inner.is_saved

    @property
    def started(self) -> bool:
        """Whether a prediction means anything yet."""
        return self.rows >= _START_ROWS

    def learn(self, block: Design) -> None:
        """Predict, score and learn each row of the block that is seen."""
        if self.median_us == 0.0:
            self.median_us = float(middle(block.elapsed_us / block.steps))
        seen = self.thinning.pick(block.end_ns)
        if len(seen):
            self.learn_seen(block.x[seen] / block.steps[seen, None], block.elapsed_us[seen] / block.steps[seen])

    def learn_seen(self, x: Floats, per_step: Floats) -> None:
        """Rows x (n, p) and their time, both per step."""
        target = np.minimum(np.maximum(per_step / self.median_us - 1.0, _LOW), _HIGH).tolist()
        rows = self.inner.rows(x)
        ratios = [self.inner.learn_one(row, t) for row, t in zip(rows, target, strict=True)]
        if self.started:
            predicted = self.median_us * (1.0 + np.minimum(np.maximum(np.array(ratios), _LOW), _HIGH))
            self.error.learn(np.abs(predicted - per_step) / per_step)
        self.rows += len(x)

    def predict(self, block: Design) -> Floats:
        """Predict a block, (n,) us."""
        relative = np.minimum(np.maximum(self.inner.predict(block.x / block.steps[:, None]), _LOW), _HIGH)
        return self.median_us * block.steps * (1.0 + relative)

    def snapshot(self) -> ModelSnapshot | None:
        """Rows and error; its weights are in moving units and mean nothing on their own, so they are not listed."""
        if not self.started:
            return None
        return ModelSnapshot(features=[], rows=self.rows, effective_rows=float(self.rows), error=self.error.snapshot())
