"""What a target publishes to predict with, as one thing: x beta F by ``portable``, and a correction while that helps.

    yhat = x beta F(cell) exp(c)        c: of the corrector while it is on, else 0 (online/river/corrector.py)

Its error is of all of it; any reader can compute x beta F, whose own error and intervals stand beside it.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import numpy as np

from online.blocks import Design
from online.drift import Speed, Verdict
from online.features import FeatureSet
from online.prediction import ShapedPrediction
from online.river import CONTEXT, RESIDUAL, Corrector
from online.rls import RlsLearner
from online.rows import Floats
from online.snapshot import ModelSnapshot
from online.state import Kept

from .design_matrix import DesignMatrix
from .settings import BankSettings

SHAPED = "portable"
"""The feature set that shape factors belong to."""

_CORRECTED_NS = 1_000_000_000
"""Event time after which a correction is made anew: it follows what passes within seconds."""


class PublishedPrediction:
    """Of one target, by the coefficients of one model of p columns.

    Args:
        p: columns of ``portable``.
        corrector: of what it leaves over, where one is configured.

    Attributes:
        shaped: x beta F, its error and what it was learned from.
    """

    def __init__(self, p: int, corrector: Corrector | None) -> None:
        self.shaped = ShapedPrediction(p)
        self.corrector = corrector

    def learn(self, view: Design, context: Floats | None, log_ratio: Floats | None, speed: Speed) -> None:
        """Rows of the published lane; log_ratio = log(y / (x beta F)), (n,); None while nothing was predicted."""
        if self.corrector is None or context is None or log_ratio is None:
            self.shaped.learn(view, log_ratio)
        else:
            correction = self._correct(self.corrector, view, context, log_ratio, suspected=speed.suspicious)
            self.shaped.learn(view, log_ratio, correction)
        verdict = speed.verdict
        self.shaped.follow(suspected=verdict is Verdict.ALARM, confirmed=verdict is Verdict.CONFIRMED)

    @staticmethod
    def _correct(corrector: Corrector, view: Design, context: Floats, log_ratio: Floats, *, suspected: bool) -> Floats:
        """The correction of each row by what was known a second before, (n,); NaN where it is not made."""
        second = np.maximum.accumulate(view.end_ns // _CORRECTED_NS)
        ends = [*(np.flatnonzero(np.diff(second)) + 1).tolist(), len(view)]
        correction = np.full(len(view), np.nan)
        for start, end in zip([0, *ends], ends, strict=False):
            rows = slice(start, end)
            made = corrector.learn(view.slice(start, end), context[rows], log_ratio[rows], suspected=suspected)
            if made is not None:
                correction[rows] = made
        return correction

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
            "shape_factors": model.shape_factors(beta),
            "correction": None if corrector is None else corrector.snapshot(),
            "seen": self.shaped.seen(model.features.names),
            "interval": self.shaped.intervals.snapshot(),
            "mean_factor": self.shaped.mean_factor(),
        }

    def parts(self) -> dict[str, Any]:
        """What is saved, by name."""
        return {SHAPED: self.shaped} | ({} if self.corrector is None else {RESIDUAL: self.corrector})

    def restore(self, saved_parts: dict[str, Kept]) -> None:
        """Continue from what was saved and is still configured."""
        for name, part in self.parts().items():
            if name in saved_parts:
                saved_parts[name].fill(part)

    def add(self, other: PublishedPrediction) -> None:
        """Rows of both."""
        self.shaped.add(other.shaped)
        if self.corrector is not None and other.corrector is not None:
            self.corrector = self.corrector.merged(other.corrector)
            self.shaped.error = copy.deepcopy(
                self.shaped.shaped_error
            )  # of what is published now: nothing is corrected


def make_published(features: FeatureSet, settings: BankSettings, matrix: DesignMatrix) -> PublishedPrediction:
    """For ``portable`` of a target; with a corrector if one is configured and the target is the one of its context."""
    corrector = None
    if RESIDUAL in settings.learners and features.target is CONTEXT.target:
        matrix.add_context(CONTEXT)
        corrector = Corrector(settings.bank.river_rows_per_s)
    return PublishedPrediction(len(features), corrector)
