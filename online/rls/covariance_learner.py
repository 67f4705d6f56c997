"""The textbook recursion as a learner of the bank, ``rls_covariance``: what RLS does without the care.

Columns are divided by their first non-zero magnitude and y by the first y (fixed units: a moving scaler would redefine
the past that P remembers), rows are l-step sums with unit weight, errors are absolute, outliers are believed. The
penalty is 1e-6, the forgetting 0.9998 (half-life 3465 rows). Nothing is constrained: coefficients may be negative, so
they are listed only as a challenger's. See online/rls/recursion.py for the equations.
"""

from __future__ import annotations

import numpy as np

from online.blocks import Design
from online.features import FeatureSet
from online.prediction import PrequentialError
from online.rows import Floats
from online.snapshot import FeatureSnapshot, ModelSnapshot
from online.state import Count, Finite, saved

from .recursion import CovarianceRLS

_FORGETTING = 0.9998
_RIDGE = 1e-6


class CovarianceLearner:
    """One feature set on one target of one configuration."""

    STATE = saved(
        "rls_covariance",
        rls=CovarianceRLS,
        unit=Floats,
        unit_us=Finite,
        rows=Count,
        refused=Count,
        error=PrequentialError,
    )

    publishes = False
    is_saved = True

    def __init__(self, features: FeatureSet) -> None:
        p = len(features)
        self.features = features
        self.rls = CovarianceRLS(p, _RIDGE, _FORGETTING)
        self.unit = np.zeros(p)
        self.unit_us = 0.0
        self.rows = 0
        self.refused = 0
        self.error = PrequentialError()

    @property
    def started(self) -> bool:
        """Whether there are more rows than coefficients."""
        return self.rows > 2 * len(self.features)

    def learn(self, block: Design) -> None:
        """Predict, score and learn each row of the block."""
        y = block.elapsed_us
        if self.unit_us == 0.0:
            self.unit_us = float(y[0])
        first = np.abs(block.x).max(axis=0)
        self.unit = np.where(self.unit > 0.0, self.unit, first)
        x = block.x / np.where(self.unit > 0.0, self.unit, 1.0)
        ape = np.empty(len(block))
        for i in range(len(block)):
            ape[i] = abs(float(x[i] @ self.rls.theta) * self.unit_us - y[i]) / y[i]
            self.refused += not self.rls.learn(x[i], float(y[i]) / self.unit_us)
        if self.started:
            self.error.learn(ape)
        self.rows += len(block)

    def predict(self, block: Design) -> Floats:
        """Predict a block, (n,) us."""
        predicted: Floats = self.rls.predict(block.x / np.where(self.unit > 0.0, self.unit, 1.0)) * self.unit_us
        return predicted

    def snapshot(self) -> ModelSnapshot | None:
        """Coefficients in physical units; columns never seen are absent."""
        if not self.started:
            return None
        features = [
            FeatureSnapshot(
                name=column.name,
                unit=column.unit,
                coefficient=float(self.rls.theta[j] * self.unit_us / self.unit[j]),
                status="weak",
            )
            for j, column in enumerate(self.features.columns)
            if self.unit[j] > 0.0
        ]
        return ModelSnapshot(
            features=features, rows=self.rows, effective_rows=float(self.rows), error=self.error.snapshot()
        )
