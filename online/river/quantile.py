"""RECE's quantile models: one River linear model per quantile, pinball loss; the learner ``river:quantile``.

    minimise sum_i rho_tau(t_i - f_tau(x_i))      rho_tau(e) = max(tau e, (tau - 1) e)      tau = 0.1, 0.5, 0.9

t is the relative target of :mod:`online.river.challengers`. The median is the prediction, the outer two the interval;
crossed quantiles are put in order when read, which never makes the pinball loss worse.

Reference: Koenker and Bassett, Regression quantiles (Econometrica 1978); Chernozhukov et al., Quantile and probability
curves without crossing (Econometrica 2010); docs/systems.md, source 7.
"""

from __future__ import annotations

import numpy as np

from online.blocks import Design
from online.features import FeatureSet
from online.rows import Floats

from .challengers import QUANTILE, GuardedModel, RiverLearner

TAUS = (0.1, 0.5, 0.9)
_LOW, _HIGH = -1.0, 10.0


class QuantileLearner(RiverLearner):
    """Three quantiles of one feature set on one target; predicts by the median."""

    def __init__(self, features: FeatureSet, rows_per_s: float) -> None:
        super().__init__(QUANTILE, features, rows_per_s)
        self.outer = {tau: GuardedModel(f"{QUANTILE}@{tau}", features) for tau in (TAUS[0], TAUS[-1])}

    def learn_seen(self, x: Floats, per_step: Floats) -> None:
        """Predict, score and learn each row; the outer quantiles learn beside the median."""
        super().learn_seen(x, per_step)
        relative = per_step / self.median_us - 1.0
        target = np.minimum(np.maximum(relative, _LOW), _HIGH).tolist()
        for model in self.outer.values():
            for row, t in zip(model.rows(x), target, strict=True):
                model.learn_one(row, t)

    def interval(self, block: Design) -> Floats:
        """Quantiles 0.1, 0.5, 0.9 in microseconds, (n, 3), in order."""
        steps = block.steps[:, None]
        relative = [self.outer.get(tau, self.inner).predict(block.x / steps) for tau in TAUS]
        bounded = np.minimum(np.maximum(np.stack(relative, axis=1), _LOW), _HIGH)
        return np.sort(self.median_us * steps * (1.0 + bounded), axis=1)
