"""What a target publishes to predict with: x beta F by ``portable``, its level, and what River's regression adds.

    yhat = x beta F(cell) exp(c + d)        c: online/level.py; d: online/river/residual.py, 0 while it does not win

The headline error is of all of it, each row by what was known before it. A reader of a file computes x beta F, whose
error and intervals stand beside it; the error of x beta alone is that of the model.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from online.blocks import Design
from online.drift import Speed, Verdict
from online.features import FeatureSet
from online.level import Level
from online.prediction import ShapedPrediction, Tiles
from online.river import CONTEXT, RESIDUAL, ResidualModel
from online.rls import RlsLearner
from online.rows import Floats
from online.snapshot import ModelSnapshot, ShapeFactorSnapshot
from online.state import Kept

from .design_matrix import DesignMatrix
from .settings import BankSettings

SHAPED = "portable"
"""The feature set that shape factors belong to."""

TILES, LEVEL = "tiles", "level"


class PublishedPrediction:
    """Of one target, by the coefficients of one model.

    Args:
        names: columns of ``portable``.
        residual: River's regression on what the level leaves, where it is configured.

    Attributes:
        shaped: x beta F, its error and what it was learned from.
        tiles: whether steps with prefill are padded to whole tiles of tokens.
        level: what the last seconds took beside x beta F.
    """

    def __init__(self, names: tuple[str, ...], residual: ResidualModel | None) -> None:
        self.shaped, self.tiles, self.level = ShapedPrediction(len(names)), Tiles(names), Level()
        self.residual = residual

    def context_of(self, block: Design, matrix: DesignMatrix) -> Floats | None:
        """Columns of the residual model for the rows that ``portable`` knows, per step; None without a model."""
        if self.residual is None:
            return None
        context = block.x[:, matrix.sets[CONTEXT.name][1]] / block.steps[:, None]
        known = context if block.complete else context[matrix.known(block, SHAPED)]
        return np.fmax(known, 0.0)  # rows that waited before a model was configured have NaN

    def learn(self, view: Design, context: Floats | None, log_ratio: Floats | None, beta: Floats, speed: Speed) -> None:
        """Learn rows; log_ratio = log(y / (x beta F)), (n,); None while nothing was predicted."""
        if log_ratio is None:
            self.shaped.learn(view, None)
            return
        added = self.level.learn(view, log_ratio)
        if self.residual is not None and context is not None:
            added += self.residual.learn(context, log_ratio - added, view.end_ns)
        self.shaped.learn(view, log_ratio, np.exp(added))
        self.tiles.learn(view, log_ratio, beta)
        if speed.verdict is Verdict.CONFIRMED:
            self.shaped.forget()
            self.level.end()
        elif speed.verdict is Verdict.PREFILL:
            self.level.prefill.end()

    def with_errors(self, model: ModelSnapshot) -> ModelSnapshot:
        """The model of ``portable`` with the errors of the prediction that stands on it."""
        error, shaped_error = self.shaped.error.snapshot(), self.shaped.shaped_error.snapshot()
        return msgspec.structs.replace(model, prediction_error=error, shaped_error=shaped_error)

    def snapshot(self, model: RlsLearner, beta: Floats | None = None) -> dict[str, Any]:
        """Keys of the target's snapshot; intervals are of observed / (x beta F), as a reader predicts.

        ``beta``: coefficients (p,) that are published in place of the model's.
        """
        return {
            "shape_factors": self._padded(model.shape_factors(beta)),
            "shape_factors_applied": model.members.drift.factor_use.applied,
            "level": self.level.snapshot(),
            "correction": None if self.residual is None else self.residual.snapshot(),
            "seen": self.shaped.seen(model.features.names),
            "interval": self.shaped.intervals.snapshot(),
            "mean_factor": self.shaped.mean_factor(),
            "context_us_per_token": model.context_us_per_token(),
            "tile": self.tiles.tile(),
        }

    def _padded(self, factors: dict[str, ShapeFactorSnapshot]) -> dict[str, ShapeFactorSnapshot]:
        """With the usual padding of each shape, where there are tiles."""
        for cell, padding in self.tiles.usual_padding().items():
            if cell in factors:
                factors[cell] = msgspec.structs.replace(factors[cell], padding=padding)
        return factors

    def parts(self) -> dict[str, Any]:
        """What is saved, by name."""
        parts = {SHAPED: self.shaped, TILES: self.tiles, LEVEL: self.level}
        return parts | ({} if self.residual is None else {RESIDUAL: self.residual})

    def restore(self, saved_parts: dict[str, Kept]) -> None:
        """Continue from what was saved and is still configured."""
        for name, part in self.parts().items():
            if name in saved_parts:
                saved_parts[name].fill(part)

    def add(self, other: PublishedPrediction) -> None:
        """Rows of both; level and residual model start over."""
        self.shaped.add(other.shaped)
        self.tiles.add(other.tiles)
        self.level.add(other.level)
        if self.residual is not None and other.residual is not None:
            self.residual.add(other.residual)


def make_published(features: FeatureSet, settings: BankSettings) -> PublishedPrediction:
    """For ``portable`` of a target; with the residual model if it is configured and the target is the one of steps."""
    residual = None
    if RESIDUAL in settings.learners and features.target is CONTEXT.target:
        residual = ResidualModel(settings.bank.river_rows_per_s)
    return PublishedPrediction(features.names, residual)
