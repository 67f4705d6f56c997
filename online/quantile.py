"""RECE's quantile models: one River linear model per quantile, pinball loss; the learner ``river:quantile``.

    minimise sum_i rho_tau(t_i - f_tau(x_i))      rho_tau(e) = max(tau e, (tau - 1) e)      tau = 0.1, 0.5, 0.9

t is the relative target of :mod:`online.river_models`. The median is the prediction, the outer two the interval;
crossed quantiles are put in order when read, which never makes the pinball loss worse.

Reference: Koenker and Bassett, Regression quantiles (Econometrica 1978); Chernozhukov et al., Quantile and probability
curves without crossing (Econometrica 2010); seed system 7.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from online.blocks import Design
from online.features import FeatureSet
from online.river_models import RiverLearner
from online.rows import Floats

QUANTILE = "river:quantile"
TAUS = (0.1, 0.5, 0.9)
_LOW, _HIGH = -1.0, 10.0
_RATE = 0.01


def _pinball(tau: float) -> Any:
    linear_model = importlib.import_module("river.linear_model")
    optim = importlib.import_module("river.optim")
    preprocessing = importlib.import_module("river.preprocessing")
    model = linear_model.LinearRegression(optimizer=optim.SGD(_RATE), loss=optim.losses.Quantile(tau))
    return preprocessing.StandardScaler() | model


class QuantileLearner(RiverLearner):
    """Three quantiles of one feature set on one target; predicts by the median."""

    def __init__(self, features: FeatureSet) -> None:
        super().__init__("river:linear", features)
        self.name = QUANTILE
        self.model = _pinball(0.5)
        self.outer = {tau: _pinball(tau) for tau in (TAUS[0], TAUS[-1])}

    def learn(self, block: Design) -> None:
        """Predict, score and learn each row; the outer quantiles learn beside the median."""
        super().learn(block)
        per_step = block.elapsed_us / block.steps
        target = np.clip(per_step / self.median_us - 1.0, _LOW, _HIGH)
        x = block.x / block.steps[:, None]
        for i in range(len(block)):
            row = {name: float(x[i, j]) for j, name in self._columns}
            for tau, model in self.outer.items():
                model.learn_one(row, float(target[i]))
                if not np.isfinite(model.predict_one(row)):
                    self.outer[tau] = _pinball(tau)
                    self.restarts += 1

    def interval(self, x: Floats, steps: Floats) -> Floats:
        """Quantiles 0.1, 0.5, 0.9 in microseconds, (n, 3), in order."""
        median = self.model
        columns = []
        try:
            for tau in TAUS:
                self.model = self.outer.get(tau, median)
                columns.append(self.predict(x, steps))
        finally:
            self.model = median
        return np.sort(np.stack(columns, axis=1), axis=1)
