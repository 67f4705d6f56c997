"""Published statistics, the weights of their rows, their errors, and the monitor of the machine's speed.

Each block once: predict (that is the prequential error), weigh by the prediction, learn, solve. A suspected change of
speed (online/drift) is believed when it is confirmed: until then rows go to statistics on the side, judged by the
suspected speed.

Shapes: block of n rows, z (n, q) = [x, phase, y, l] with q = p + 2, predictions (n,).
"""

from __future__ import annotations

import copy

import numpy as np

from online.blocks import Design
from online.drift import DriftMonitor, Speed, SpeedFit, Verdict
from online.features import FeatureSet
from online.rows import Floats, Target
from online.state import saved

from .hac import Meat
from .identify import Diagnosis
from .learner_settings import LearnerSettings
from .means import Means
from .misfit import Shapes
from .prequential_scores import Scores
from .prior import Prior
from .robust import Weighing
from .slow_member import SlowMember
from .startup import Start

MEAN_TARGETS = frozenset({Target.API_QUEUEING, Target.POST_DECODE, Target.FIRST_RESPONSE})
"""Skewed times that add up to what a request sees: their mean is what adds up, and a robust fit is far off in it."""

_TINY_US = 1e-9


class Members:
    """All of it, over p columns.

    Args:
        features: their columns.
        settings: bounds and rates.
        prior: what is known of the coefficients before the first row.
        slow_kind: what keeps and solves the published statistics.
    """

    STATE = saved(
        "members",
        weighing=Weighing,
        slow=SlowMember,
        scores=Scores,
        drift=DriftMonitor,
        means=Means,
    )

    def __init__(
        self, features: FeatureSet, settings: LearnerSettings, prior: Prior | None, slow_kind: type[SlowMember]
    ) -> None:
        p = len(features)
        self._settings = settings
        self.target = features.target
        self.weighing = Weighing(robust=features.target not in MEAN_TARGETS)
        self.slow = slow_kind(features, settings, prior)
        self.scores = Scores()
        self.drift = DriftMonitor(p, settings.drift)
        self.means = Means(p + 2, settings.half_life_steps)
        self.speed: Speed | None = None

    def widen(self, more: int) -> None:
        """Give all of them ``more`` columns, free of sign, after their p."""
        self.means.widen(self.slow.p, more)
        self.slow.widen(more)
        self.drift.cells.widen(more)

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
            if speed is None:
                speed = self._watch_speed(block, z, log_ratio)
            self.speed = speed
            if self._act(speed):
                prediction = self.predict(z)
        if self.slow.trial is not None:
            prediction = prediction * self.drift.gain
        share, weight = self.weighing.weigh(block, prediction)
        if self.slow.learn(block, z, weight, share, prediction):
            self.solve_slow()
        self.weighing.follow(block)
        return log_ratio

    def start(self, held: Design, z: Floats, scale: float) -> None:
        """The held rows z (n, q) have been fitted: a donor's shapes begin there."""
        prediction = np.maximum(z[:, : self.slow.p] @ self.slow.beta, _TINY_US)
        self.drift.cells.settle(held.cell, np.log(held.elapsed_us / prediction), self.slow.beta)
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
        self.drift.open_cells(held.cell[usual], z[usual, : self.slow.p], log_ratio, self.slow.beta)

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
        if not shaped and not Meat.tells_of(rows, int(np.count_nonzero(self.slow.live))):
            return self.diagnosis(g, rows)  # nothing of them is asked for
        told = copy.copy(self)
        told.slow = copy.copy(self.slow)
        told.slow.strata, told.slow.meat = self.slow.new_strata(), Meat(self.slow.p)
        told.slow.learn_held(held, z, start.weight, start.share)
        if shaped:
            told.drift = copy.deepcopy(self.drift)
            told.open_cells(held, z, start)
        return told.diagnosis(g, rows)

    def _shapes(self, rows: float) -> Shapes | None:
        """What the form misses by batch shape; None where this model's own references are not kept up."""
        if self.target.vector != "beta":
            return None
        cells = self.drift.cells
        visited = cells.rows.nonzero()[0]
        seen_rows = cells.rows[visited]
        total = float(seen_rows.sum())
        if not total or total < 0.5 * float(self.slow.strata.n1.sum()):
            return None
        usual = cells.usual(visited, self.slow.beta)
        believed, spread = cells.believed(visited, usual), cells.spread[visited]
        return Shapes(cells.x[visited], usual, believed, spread, seen_rows, seen_rows * (rows / total))

    def solve_slow(self) -> None:
        """Published coefficients from what is remembered."""
        self.slow.solve_strata(self.weighing.scale)

    # ---------------------------------------------------------------- change of speed

    def _watch_speed(self, block: Design, z: Floats, log_ratio: Floats) -> Speed:
        """Look for a change of speed."""
        slow = self.slow
        fit = SpeedFit(slow.beta, self.weighing.scale, slow.evidence, slow.evidence_rows)
        end_ns = int(block.end_ns[-1])
        return self.drift.learn(block.cell, z[:, : slow.p], block.steps, log_ratio, block.engine, fit, end_ns)

    def _act(self, speed: Speed) -> bool:
        """Act on a change of speed; True if predictions are no longer what they were."""
        self.drift.gain = speed.gain
        on_trial = self.slow.trial is not None
        if speed.verdict is Verdict.ALARM:
            self.refute_trial()
            self._open_trial()
        elif on_trial and speed.verdict is Verdict.CONFIRMED:
            self._accept_trial()
        elif on_trial and not speed.suspicious:
            self.refute_trial()
        elif speed.verdict is Verdict.PREFILL:
            self.slow.discount_prefill(self._settings.alarm_keep, speed.gain)
            self.solve_slow()
        else:
            return False
        return True

    def _open_trial(self) -> None:
        self.slow.open_trial()
        self.weighing.scale *= 2.0

    def _accept_trial(self) -> None:
        self.slow.accept_trial(self.drift.gain)
        self.means.discount(self._settings.alarm_keep, self.drift.gain)
        self.solve_slow()

    def refute_trial(self) -> None:
        """Give up a suspicion. Its rows were judged by a speed that was none, and are forgotten with it."""
        if self.slow.trial is not None:
            self.slow.trial = None

    # ---------------------------------------------------------------- merging

    def add(self, other: Members) -> None:
        """Statistics of both; medians are weighed by rows. Scale and errors: online/rls/merging.py."""
        rows, others = float(self.slow.strata.n1.sum()), float(other.slow.strata.n1.sum())
        share = others / (rows + others) if rows + others > 0.0 else 0.5
        self.weighing.median_us += share * (other.weighing.median_us - self.weighing.median_us)
        self.slow.add(other.slow)
        self.drift.add(other.drift)
        self.means.add(other.means)

    def restart_detector(self) -> None:
        """Nothing is suspected, as after a merge."""
        self.drift = self.drift.restarted()
        self.slow.trial = None
