"""What a target publishes to predict with, as one thing: x beta F by ``portable``, and a correction while that helps.

    yhat = x beta F(cell) exp(c)        c: of the corrector while it is on, else 0 (online/river/corrector.py)

Its error is of all of it; any reader can compute x beta F, whose own error and intervals stand beside it. Both errors
are of every row: the corrector sees some, and what it says of one stands until the next.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import numpy as np

from online.blocks import Design
from online.drift import Speed, Verdict
from online.features import FeatureSet
from online.prediction import ShapedPrediction, Tiles
from online.river import CONTEXT, RESIDUAL, Corrector, SeenRows
from online.rls import RlsLearner
from online.rows import Floats, RowBlock
from online.snapshot import ModelSnapshot, ShapeFactorSnapshot
from online.state import Kept

from .design_matrix import DesignMatrix
from .settings import BankSettings

SHAPED = "portable"
"""The feature set that shape factors belong to."""

TILES = "tiles"


class PublishedPrediction:
    """Of one target, by the coefficients of one model.

    Args:
        names: columns of ``portable``.
        corrector: of what it leaves over, where one is configured.

    Attributes:
        shaped: x beta F, its error and what it was learned from.
        tiles: whether steps with prefill are padded to whole tiles of tokens.
    """

    def __init__(self, names: tuple[str, ...], corrector: Corrector | None) -> None:
        self.shaped, self.tiles = ShapedPrediction(len(names)), Tiles(names)
        self.corrector = corrector

    def look_at(self, rows: RowBlock, waiting: int) -> None:
        """Rows as they come, behind those that wait to be learned."""
        if self.corrector is not None:
            self.corrector.look_at(rows, waiting)

    def seen_of(self, block: Design, matrix: DesignMatrix) -> SeenRows | None:
        """The rows of ``portable`` in the next block that the corrector sees; None without one."""
        if self.corrector is None:
            return None
        seen = self.corrector.waiting.take(len(block))
        return seen if block.complete else seen.among(matrix.known(block, SHAPED))

    def learn(self, view: Design, seen: SeenRows | None, log_ratio: Floats | None, beta: Floats, speed: Speed) -> None:
        """Learn rows; log_ratio = log(y / (x beta F)), (n,); None while nothing was predicted."""
        corrected = None
        if self.corrector is not None and seen is not None and log_ratio is not None:
            corrected = self._correct(self.corrector, view, seen, log_ratio, suspected=speed.suspicious)
        self.shaped.learn(view, log_ratio, corrected)
        if log_ratio is not None:
            self.tiles.learn(view, log_ratio, beta)
        if speed.verdict is Verdict.CONFIRMED:
            self.shaped.forget()

    @staticmethod
    def _correct(
        corrector: Corrector, view: Design, seen: SeenRows, log_ratio: Floats, *, suspected: bool
    ) -> Floats | None:
        """exp(c) of every row, (n,), None where c = 0; of those that are seen by what was known a second before."""
        corrector.skip(len(view) - len(seen))
        standing = np.zeros(len(seen) + 1)
        standing[0] = corrector.standing
        if len(seen):
            at, context = seen.place, seen.context
            standing[1:] = corrector.learn(context, log_ratio[at], view.end_ns[at], suspected=suspected)
        if not standing.any():
            return None
        return np.repeat(np.exp(standing), np.diff(seen.place, prepend=0, append=len(view)))

    def with_errors(self, model: ModelSnapshot) -> ModelSnapshot:
        """The model of ``portable`` with the errors of the prediction that stands on it."""
        shaped = None if self.corrector is None else self.shaped.shaped_error.snapshot()
        return msgspec.structs.replace(model, prediction_error=self.shaped.error.snapshot(), shaped_error=shaped)

    def snapshot(self, model: RlsLearner, beta: Floats | None = None) -> dict[str, Any]:
        """Keys of the target's snapshot; intervals are of observed / (x beta F), as a reader predicts.

        ``beta``: coefficients (p,) that are published in place of the model's.
        """
        corrector = self.corrector
        return {
            "shape_factors": self._padded(model.shape_factors(beta)),
            "shape_factors_applied": model.members.shapes.applied,
            "correction": None if corrector is None else corrector.snapshot(),
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
        return {SHAPED: self.shaped, TILES: self.tiles} | ({} if self.corrector is None else {RESIDUAL: self.corrector})

    def restore(self, saved_parts: dict[str, Kept]) -> None:
        """Continue from what was saved and is still configured."""
        for name, part in self.parts().items():
            if name in saved_parts:
                saved_parts[name].fill(part)

    def add(self, other: PublishedPrediction) -> None:
        """Rows of both."""
        self.shaped.add(other.shaped)
        self.tiles.add(other.tiles)
        if self.corrector is not None and other.corrector is not None:
            self.corrector = self.corrector.merged(other.corrector)
            self.shaped.error = copy.deepcopy(
                self.shaped.shaped_error
            )  # of what is published now: nothing is corrected


def make_published(features: FeatureSet, settings: BankSettings) -> PublishedPrediction:
    """For ``portable`` of a target; with a corrector if one is configured and the target is the one of its context."""
    corrector = None
    if RESIDUAL in settings.learners and features.target is CONTEXT.target:
        corrector = Corrector(settings.bank.river_rows_per_s)
    return PublishedPrediction(features.names, corrector)
