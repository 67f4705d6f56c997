"""One stream of steps, learned as it is live, with what was predicted of each row and when changes were reported."""

from __future__ import annotations

import numpy as np

from collector.config import Config
from online.blocks import Design
from online.change import DETECTORS
from online.features import portable
from online.rows import RowBlock, Target
from online.target import TargetState

NEVER = 10**9


class Watched:
    """One stream, learned block by block.

    Attributes:
        model: the learner at its end.
        shaped, slow: relative errors of x beta F and x beta before each row was learned, (n,), NaN before the first
            fit.
        reports: rows learned when each change was reported.
    """

    def __init__(self, rows: RowBlock, detector: str = DETECTORS[0]) -> None:
        state = TargetState(Target.STEP_TIME, Config(learners=("rls",), detector=detector))
        state.add_features(portable(Target.STEP_TIME))
        self.model = state.models["portable"]
        self._learn, state._learn_block = state._learn_block, self._learn_watched
        self.shaped, self.slow = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
        self.reports: list[int] = []
        self._at = 0
        state.learn(rows)
        state.flush()

    def _learn_watched(self, rows):
        model, block = self.model, Design.of(self.model.features, rows)
        here = slice(self._at, self._at + len(block))
        if model.started:
            predicted = block.x @ model.beta[: block.x.shape[1]]
            self.slow[here] = np.abs(predicted / block.elapsed_us - 1)
            self.shaped[here] = np.abs(predicted * np.exp(model.log_factors(block.cell)) / block.elapsed_us - 1)
        self._learn(rows)
        self._at += len(block)
        self.reports += [self._at] * (model.drift.confirmed - len(self.reports))

    def reported_after(self, onset: int) -> int:
        """Rows from the onset to the first report."""
        return next((at - onset for at in self.reports if at > onset), NEVER)

    def error(self, start: int, rows: int, which: str = "shaped") -> float:
        """Mean relative error of so many rows."""
        return float(np.nanmean(getattr(self, which)[start : start + rows]))
