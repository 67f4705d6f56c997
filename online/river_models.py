"""River's regressors behind the same contract: independent challengers, imported only when one is configured.

A challenger sees rows one at a time as a dict of per-step features x / l and a relative target

    t = clip(y / (l m) - 1, -1, 10)          m: running median of y / l; prediction = l m (1 + t^)

because every River model that was tried diverges or crawls on raw microseconds with outliers: targets must be
winsorised, and a median is the unit that stalls do not move (second-order models behind a moving StandardScaler fail
outright). ``river:linear`` = StandardScaler | LinearRegression(SGD(0.01), Huber(0.1)): 1.5 to 4 % on simulations.
Any other regressor is named by its dotted path below ``river``, e.g. ``river:tree.HoeffdingTreeRegressor``, and is
built with its defaults behind a StandardScaler.

Guarantee: predictions are finite and within [0, 11 l m]; a model that raises or predicts a non-finite value is replaced
by a fresh one and the restart is counted. Reference: Montiel et al., River (JMLR 2021).
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import numpy as np

from online.blocks import Design
from online.errors import PrequentialError
from online.features import INTERCEPT, FeatureSet
from online.robust import middle
from online.rows import Floats
from online.snapshot import ModelSnapshot

PREFIX = "river:"
_LOW, _HIGH = -1.0, 10.0
_START_ROWS = 32


class Regressor(Protocol):
    """What a River regressor promises."""

    def learn_one(self, x: dict[str, float], y: float) -> object:
        """Learn one row."""

    def predict_one(self, x: dict[str, float]) -> float:
        """Predict one row."""


def make(name: str) -> Any:
    """A fresh regressor for ``river:linear`` or ``river:<dotted name>``.

    Raises:
        ValueError: if there is no such class in River, it is not a regressor or needs arguments.
    """
    dotted = name.removeprefix(PREFIX)
    preprocessing = importlib.import_module("river.preprocessing")
    if dotted == "linear":
        linear_model = importlib.import_module("river.linear_model")
        optim = importlib.import_module("river.optim")
        model = linear_model.LinearRegression(optimizer=optim.SGD(0.01), loss=optim.losses.Huber(0.1))
        return preprocessing.StandardScaler() | model
    module, _, class_name = dotted.rpartition(".")
    base = importlib.import_module("river.base")
    try:
        model = getattr(importlib.import_module(f"river.{module}"), class_name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"learner {name!r}: river has no {dotted!r} that needs no arguments ({error})") from error
    if not isinstance(model, base.Regressor):
        raise ValueError(f"learner {name!r}: {dotted!r} is not a regressor")  # noqa: TRY004  a configuration error
    return preprocessing.StandardScaler() | model


class RiverLearner:
    """One River regressor on one feature set of one target."""

    def __init__(self, name: str, features: FeatureSet) -> None:
        self.name = name
        self.features = features
        self.model: Regressor = make(name)
        self.median_us = 0.0
        self.rows = 0
        self.restarts = 0
        self.error = PrequentialError()
        self._columns = [(j, c.name) for j, c in enumerate(features.columns) if c.name != INTERCEPT]

    @property
    def started(self) -> bool:
        """Whether a prediction means anything yet."""
        return self.rows >= _START_ROWS

    def learn(self, block: Design) -> None:
        """Predict, score and learn each row of the block."""
        steps = block.steps
        per_step = block.elapsed_us / steps
        if self.median_us == 0.0:
            self.median_us = float(middle(per_step))
        x = block.x / steps[:, None]
        target = np.clip(per_step / self.median_us - 1.0, _LOW, _HIGH)
        ape = np.empty(len(block))
        for i in range(len(block)):
            row = {name: float(x[i, j]) for j, name in self._columns}
            predicted = self._one(row, float(target[i]))
            ape[i] = abs(self.median_us * (1.0 + predicted) - per_step[i]) / per_step[i]
        if self.started:
            self.error.learn(ape)
        self.rows += len(block)

    def _one(self, row: dict[str, float], target: float) -> float:
        try:
            predicted = float(self.model.predict_one(row))
            self.model.learn_one(row, target)
        except (ArithmeticError, ValueError, TypeError):
            predicted = float("nan")
        if not np.isfinite(predicted):
            self.model = make(self.name)
            self.restarts += 1
            return 0.0
        return min(max(predicted, _LOW), _HIGH)

    def predict(self, x: Floats, steps: Floats) -> Floats:
        """Microseconds for rows x (n, p) of steps (n,) each."""
        out = np.empty(len(x))
        for i in range(len(x)):
            row = {name: float(x[i, j] / steps[i]) for j, name in self._columns}
            predicted = float(self.model.predict_one(row))
            out[i] = min(max(predicted, _LOW), _HIGH) if np.isfinite(predicted) else 0.0
        return self.median_us * steps * (1.0 + out)

    def snapshot(self) -> ModelSnapshot | None:
        """Rows and error; its weights are in moving units and mean nothing on their own, so they are not listed."""
        if not self.started:
            return None
        return ModelSnapshot(features=[], rows=self.rows, effective_rows=float(self.rows), error=self.error.snapshot())
