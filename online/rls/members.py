"""Published statistics, the weights of their rows, their errors, and the monitor of the machine's speed.

Each block once: predict (that is the prequential error), look for a change of speed (online/drift), weigh by the
prediction, learn, solve, learn the shape factors (online/shapes.py). At a confirmed change 2 % of the evidence is kept
and multiplied by the gain: the rows since it began, which are in it, are then few beside those that come.

Shapes: block of n rows, z (n, q) = [x, phase, y, l] with q = p + 2, predictions (n,).
"""

from __future__ import annotations

import copy
import math

import numpy as np

from online.blocks import CELLS, PREFILL_CELL, Design
from online.constants import TINY_US
from online.drift import ChangeMonitor, Speed, Verdict
from online.features import FeatureSet
from online.rows import Floats, Mask, Target
from online.shapes import ShapeFactors
from online.state import Stateful

from .error_bars import Meat, Shapes
from .identify import Diagnosis
from .learner_settings import LearnerSettings
from .means import Means
from .prequential_scores import Scores
from .prior import Prior
from .robust import Weighing
from .slow_member import SlowMember
from .startup import Start

MEAN_TARGETS = frozenset({Target.API_QUEUEING, Target.POST_DECODE, Target.FIRST_RESPONSE})
"""Skewed times that add up to what a request sees: their mean is what adds up, and a robust fit is far off in it."""

_EVERY_SHAPE: Mask = np.ones(CELLS, np.bool_)
_WITH_PREFILL: Mask = np.arange(CELLS) >= PREFILL_CELL


class Members(Stateful):
    """All of it, over p columns.

    Args:
        features: their columns.
        settings: bounds and rates.
        prior: what is known of the coefficients before the first row.
        slow_kind: what keeps and solves the published statistics.
    """

    SAVED = ("weighing", "slow", "scores", "shapes", "drift", "means")

    def __init__(
        self, features: FeatureSet, settings: LearnerSettings, prior: Prior | None, slow_kind: type[SlowMember]
    ) -> None:
        p = len(features)
        self._settings = settings
        self.target = features.target
        self.weighing = Weighing(robust=features.target not in MEAN_TARGETS)
        self.slow = slow_kind(features, settings, prior)
        self.scores = Scores()
        self.shapes = ShapeFactors(p)
        self.drift = ChangeMonitor(settings.detector)
        self.means = Means(p + 2, settings.half_life_steps)
        self.speed: Speed | None = None

    def widen(self, more: int) -> None:
        """Give all of them ``more`` columns, free of sign, after their p."""
        self.means.widen(self.slow.p, more)
        self.slow.widen(more)
        self.shapes.widen(more)

    def predict(self, z: Floats) -> Floats:
        """Of rows z, (n,)."""
        prediction: Floats = z[:, : self.slow.p] @ self.slow.beta
        return prediction

    # ---------------------------------------------------------------- learning

    def score(self, block: Design, prediction: Floats) -> Floats:
        """Count errors; log(y / prediction), (n,)."""
        return self.scores.score(block, prediction)

    def learn(self, block: Design, z: Floats, speed: Speed | None = None) -> Floats:
        """Learn rows; log(y / prediction) by the published coefficients as they were before, (n,).

        ``speed``: what another learner of the target found; None = this one watches.
        """
        prediction = self.predict(z)
        log_ratio = self.score(block, prediction)
        if self.weighing.robust:
            watches = speed is None
            self.speed = self._watch_speed(block, z, log_ratio) if speed is None else speed
            if self._act(self.speed, watches=watches):
                prediction = self.predict(z)
        share, weight = self.weighing.weigh(block, prediction)
        self.slow.learn(block, z, weight, share, prediction)
        self.solve_slow()
        self.weighing.follow(block)
        return log_ratio

    def start(self, held: Design, z: Floats, scale: float) -> None:
        """The held rows z (n, q) have been fitted: a donor's shapes begin there."""
        prediction = np.maximum(z[:, : self.slow.p] @ self.slow.beta, TINY_US)
        self.shapes.settle(held.cell, np.log(held.elapsed_us / prediction), self.slow.beta)
        self.weighing.scale = scale

    def release(self, held: Design, z: Floats, start: Start) -> None:
        """The held rows become statistics."""
        self.slow.learn_held(held, z, start.weight, start.share)
        self.open_cells(held, z, start)
        self.solve_slow()

    def open_cells(self, held: Design, z: Floats, start: Start) -> None:
        """References of the held rows' batch shapes, without the rows that the first fit left out."""
        prediction = z[:, : self.slow.p] @ self.slow.beta
        usual = (start.share > 0.0) & (prediction > 0.0)
        log_ratio = np.log(held.elapsed_us[usual] / prediction[usual])
        self.shapes.learn(held.cell[usual], z[usual, : self.slow.p], log_ratio, self.slow.beta)

    def diagnosis(self, g: Floats, rows: float) -> Diagnosis:
        """Error bars and status of the published coefficients, which solve g (q, q) of so many effective rows."""
        scale, beta = self.weighing.scale, self.slow.beta
        variance = scale**2
        if not self.weighing.robust:
            # The scale is a median's, which does not see the tail that a mean fit lives on.
            squares = g[-2, -2] - 2.0 * (g[-2, : len(beta)] @ beta) + beta @ g[: len(beta), : len(beta)] @ beta
            variance = max(variance, float(squares) / max(rows, 1.0))
        return self.slow.diagnosis(g, scale, variance, self._shapes(rows))

    def diagnosis_of_held(self, held: Design, z: Floats, start: Start) -> Diagnosis:
        """As if the held rows z (n, q), which beta fits, were statistics: they err together and misfit as others do.

        Only what error bars ask for is made of them: a copy of all, solved anew, took three times as long.
        """
        g, rows, shaped = (z * start.weight[:, None]).T @ z, float(held.weight.sum()), self.target.vector == "beta"
        told = copy.copy(self)
        told.slow = copy.copy(self.slow)
        told.slow.strata, told.slow.meat = self.slow.new_strata(), Meat(self.slow.p)
        told.slow.learn_held(held, z, start.weight, start.share)
        if shaped:
            told.shapes = copy.deepcopy(self.shapes)
            told.open_cells(held, z, start)
        return told.diagnosis(g, rows)

    def _shapes(self, rows: float) -> Shapes | None:
        """What the form misses by batch shape; None where this model's own references are not kept up."""
        if self.target.vector != "beta":
            return None
        shapes = self.shapes
        visited = shapes.rows.nonzero()[0]
        seen_rows = shapes.rows[visited]
        total = float(seen_rows.sum())
        if not total or total < 0.5 * float(self.slow.strata.n1.sum()):
            return None
        usual, believed = shapes.usual(visited, self.slow.beta), shapes.believed(visited)
        rows_behind = seen_rows * (rows / total)
        return Shapes(shapes.x[visited], usual, believed, shapes.spread[visited], seen_rows, rows_behind)

    def solve_slow(self) -> None:
        """Published coefficients from what is remembered."""
        self.slow.solve_strata(self.weighing.scale)

    # ---------------------------------------------------------------- change of speed

    def _watch_speed(self, block: Design, z: Floats, log_ratio: Floats) -> Speed:
        """Look for a change of speed; shape factors follow unless one is suspected, or their shape has none yet."""
        shapes, beta, x = self.shapes, self.slow.beta, z[:, : self.slow.p]
        shapes.score(log_ratio, shapes.log_factors(beta)[block.cell])
        speed = self.drift.learn(block, log_ratio, shapes, beta)
        if speed.verdict is Verdict.NOTHING:
            shapes.learn(block.cell, x, log_ratio, beta)
        return speed

    def _act(self, speed: Speed, *, watches: bool) -> bool:
        """Keep little of what was known, at the new speed; True if predictions are no longer what they were."""
        keep, gain = self._settings.alarm_keep, speed.gain
        if speed.verdict is Verdict.NOTHING:
            return False
        if speed.verdict is Verdict.PREFILL:
            self.slow.discount_prefill(keep, gain)
        else:
            self.slow.discount(keep, gain)
            self.means.discount(keep, gain)
        if watches:
            self.shapes.shift(_WITH_PREFILL if speed.verdict is Verdict.PREFILL else _EVERY_SHAPE, math.log(gain))
        self.solve_slow()
        return True

    # ---------------------------------------------------------------- merging

    def add(self, other: Members) -> None:
        """Statistics of both; medians are weighed by rows. Scale and errors: online/rls/merging.py."""
        rows, others = float(self.slow.strata.n1.sum()), float(other.slow.strata.n1.sum())
        share = others / (rows + others) if rows + others > 0.0 else 0.5
        self.weighing.median_us += share * (other.weighing.median_us - self.weighing.median_us)
        self.slow.add(other.slow)
        self.shapes.add(other.shapes)
        self.means.add(other.means)

    def restart_detector(self) -> None:
        """No change was seen, as after a merge."""
        self.drift = self.drift.restarted()
