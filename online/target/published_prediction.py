"""What a target publishes to predict with: x beta F by ``portable``, its level, and what River's regression adds.

    yhat = x beta F(cell) exp(c + d)        c: online/level.py; d: online/river.py, 0 while it does not win

The headline error is of all of it, each row by what was known before it. A reader of a file computes x beta F, whose
error and intervals stand beside it; the error of x beta alone is that of the model.

    r_i = log(y_i / (x_i beta F_c))         beta, F: as published before row i was learned; c: the row's batch shape
    mean_factor = sum y / sum (x beta F)    both forgotten with a half-life of 4000 steps: what stalls add
    seen: the lowest and highest value per step of each column, and the cells with a learned row; they only widen

Microseconds; r (n,). Merging adds rows and takes the wider range; what tells of one prediction starts over: its errors,
level and residual model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from online.blocks import CELLS, Design, cell_name
from online.change import Change
from online.constants import ALARM_KEEP, HALF_LIFE_STEPS
from online.errors import Intervals, PrequentialError
from online.features import INTERCEPT, FeatureSet
from online.level import Level
from online.rls import RlsLearner
from online.rows import Floats, Mask, Target
from online.snapshot import ModelSnapshot, SeenSnapshot
from online.state import Stateful

from .settings import RESIDUAL, BankSettings, river_module

if TYPE_CHECKING:
    from online.river import ResidualModel


class PublishedPrediction(Stateful):
    """Of one target, by the coefficients of ``portable``.

    ``error`` is of all that is published, ``shaped_error`` and ``intervals`` of x beta F. ``low``, ``high``: seen, of
    each column per step, (p,); nothing before the first row. ``cells``: batch shapes with a learned row, (512,).
    ``residual``: where River's regression is configured. ``observed_us``, ``predicted_us``: decayed sums.
    """

    SAVED = (
        *("error", "shaped_error", "intervals", "low", "high", "cells", "level"),
        *("observed_us", "predicted_us", "residual"),
    )
    OPTIONAL = frozenset({"residual"})

    def __init__(self, features: FeatureSet, settings: BankSettings) -> None:
        self.error, self.shaped_error, self.intervals = PrequentialError(), PrequentialError(), Intervals()
        self.low, self.high = np.zeros(len(features)), np.zeros(len(features))
        self.cells: Mask = np.zeros(CELLS, np.bool_)
        self.level, self.observed_us, self.predicted_us = Level(), 0.0, 0.0
        self.residual: ResidualModel | None = None
        if RESIDUAL in settings.learners and features.target is Target.STEP_TIME:
            self.residual = river_module().ResidualModel()

    def learn(self, view: Design, log_ratio: Floats | None, change: Change | None) -> None:
        """Rows of a block, log(y / (x beta F)), (n,), None while nothing was predicted, and a change in them."""
        per_step = np.divide(view.x.T, view.steps, order="C")  # (p, n): by columns of n, numpy takes a tenth as long
        self._see(per_step.min(axis=1), per_step.max(axis=1))
        self.cells[view.cell] = True
        if log_ratio is None:
            return
        added = self.level.learn(view, log_ratio)
        if self.residual is not None:
            added += self.residual.learn(view, log_ratio - added)
        inverse = np.exp(-log_ratio)
        self.intervals.learn(view, log_ratio)
        self.shaped_error.learn(np.abs(inverse - 1.0))
        self.error.learn(np.abs(inverse * np.exp(added) - 1.0))
        self.decay(float(view.steps @ view.weight) / HALF_LIFE_STEPS)
        self.observed_us += float(view.elapsed_us.sum())
        self.predicted_us += float(view.elapsed_us @ inverse)
        if change is not None and change.prefill:
            self.level.prefill.end()
        elif change is not None:  # it is in beta from now on: what was summed up is of another machine
            self.intervals.forget(ALARM_KEEP)
            self.observed_us, self.predicted_us = self.observed_us * ALARM_KEEP, self.predicted_us * ALARM_KEEP
            self.level.end()

    def _see(self, low: Floats, high: Floats) -> None:
        if self.cells.any():
            low, high = np.minimum(low, self.low), np.maximum(high, self.high)
        self.low, self.high = low, high

    def decay(self, half_lives: float) -> None:
        """Forget sums as if rows worth so many half-lives had been learned."""
        kept = 2.0**-half_lives
        self.observed_us, self.predicted_us = self.observed_us * kept, self.predicted_us * kept

    def add(self, other: PublishedPrediction) -> None:
        """Rows of both."""
        self.error, self.shaped_error = PrequentialError(), PrequentialError()
        self.intervals.add(other.intervals)
        if other.cells.any():
            self._see(other.low, other.high)
            self.cells |= other.cells
        self.level.add(other.level)
        self.observed_us += other.observed_us
        self.predicted_us += other.predicted_us
        if self.residual is not None and other.residual is not None:
            self.residual.add(other.residual)

    def with_errors(self, model: ModelSnapshot) -> ModelSnapshot:
        """The model of ``portable`` with the errors of the prediction that stands on it."""
        error, shaped_error = self.error.snapshot(), self.shaped_error.snapshot()
        return msgspec.structs.replace(model, prediction_error=error, shaped_error=shaped_error)

    def snapshot(self, model: RlsLearner, beta: Floats | None = None) -> dict[str, Any]:
        """Keys of the target's snapshot; intervals are of observed / (x beta F), as a reader predicts.

        ``beta``: coefficients (p,) that are published in place of the model's.
        """
        own, names = model.beta, model.features.names
        ranges = zip(names, self.low.tolist(), self.high.tolist(), strict=True)
        features = {name: (low, high) for name, low, high in ranges if name != INTERCEPT}
        cells = [cell_name(cell) for cell in np.flatnonzero(self.cells).tolist()]
        seen = SeenSnapshot(features=features, cells=sorted(cells)) if cells else None
        return {
            "shape_factors": model.shapes.snapshot(own if beta is None else np.append(beta, own[len(beta) :]), names),
            "shape_factors_applied": model.shapes.applied,
            "level": self.level.snapshot(),
            "correction": None if self.residual is None else self.residual.snapshot(),
            "seen": seen,
            "interval": self.intervals.snapshot(),
            "mean_factor": self.observed_us / self.predicted_us if self.predicted_us > 0.0 else None,
            "context_us_per_token": model.context_us_per_token(),
        }
