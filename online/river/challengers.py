"""``river:<dotted name>``: a regressor of River beside ``rls``, e.g. ``river:tree.HoeffdingTreeRegressor``.

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
from typing import Any

import numpy as np

from online.blocks import Design, median_of
from online.errors import PrequentialError
from online.features import INTERCEPT, FeatureSet
from online.rows import Floats
from online.snapshot import ModelSnapshot

from .residual import Thinning

PREFIX = "river:"
# Guard: a prediction is within 0 and 11 times the median.
_LOW, _HIGH = -1.0, 10.0
# Guess: rows of which a median and an error say something.
_START_ROWS = 32


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
        return self.rows >= _START_ROWS

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
