"""Who predicts live: the slow or the fast member, by their errors on rows not yet learned.

    ape    = |yhat / y - 1|                                           (2, n), by both members, before learning
    r_k   <- r_k + rate min(1, n / 32) (min(middle ape_k, 1) - r_k)   decayed median error of each member, (2,)
    other becomes champion where  r_other < 0.9 r_champion            never while a change of speed is on trial

Errors of the published coefficients and of the live prediction are counted apart; intervals are the live one's. Once
rows come down the quick lane, they alone teach and score what predicts live.
"""

from __future__ import annotations

import numpy as np

from online.blocks import Design
from online.prediction import Intervals, PrequentialError, Shift, binned
from online.rows import Floats
from online.state import StateError, saved

from .learner_settings import LearnerSettings
from .robust import FAST, SLOW, middle

_TINY_US = 1e-9
_BLOCK_ROWS = 32.0


class Champion:
    """Scores of both members.

    Attributes:
        member: who predicts live, SLOW or FAST.
        recent: decayed median error of both, (2,).
        quick: whether rows of the quick lane have come.
        error: of the published coefficients.
        live_error, intervals: of the live prediction.
        learns_intervals: not where another prediction's are published (online/target/published_prediction.py).
    """

    STATE = saved(
        "champion",
        member=int,
        recent=Floats,
        quick=bool,
        error=PrequentialError,
        live_error=PrequentialError,
        intervals=Intervals,
    )

    def __init__(self, settings: LearnerSettings) -> None:
        self._rate, self._advantage = settings.champion_rate, settings.champion_advantage
        self.member = SLOW
        self.recent = np.zeros(2)
        self.quick = False
        self.error, self.live_error = PrequentialError(), PrequentialError()
        self.intervals = Intervals()
        self.learns_intervals = True

    def restored(self) -> None:
        """There are two members."""
        if self.member not in (SLOW, FAST):
            raise StateError(f"no member {self.member}")

    def score(self, block: Design, prediction: Floats, *, on_trial: bool) -> Floats:
        """Errors of predictions (n, 2) of the published lane; log(y / prediction) of the slow member, (n,)."""
        ape, log_ratio = _errors(block, prediction)
        counted = binned(ape[SLOW])
        self.error.add_counts(*counted)
        if not self.quick:
            counted = counted if self.member == SLOW else binned(ape[FAST])
            self._score_live(block, ape, log_ratio, counted, on_trial=on_trial)
        slow: Floats = log_ratio[SLOW]
        return slow

    def score_quick(self, block: Design, prediction: Floats, *, on_trial: bool) -> None:
        """Errors of predictions (n, 2) of the quick lane."""
        self.quick = True
        ape, log_ratio = _errors(block, prediction)
        self._score_live(block, ape, log_ratio, binned(ape[self.member]), on_trial=on_trial)

    def _score_live(
        self, block: Design, ape: Floats, log_ratio: Floats, counted: tuple[Floats, float, int], *, on_trial: bool
    ) -> None:
        self.live_error.add_counts(*counted)
        if self.learns_intervals:
            self.intervals.learn(block, log_ratio[self.member])
        rate = self._rate * min(1.0, len(block) / _BLOCK_ROWS)
        median = np.minimum(middle(ape), 1.0)
        self.recent = self.recent + rate * (median - self.recent) if self.recent.any() else median
        other = 1 - self.member
        if not on_trial and self.recent[other] < self._advantage * self.recent[self.member]:
            self.member = other

    def open_trial(self) -> None:
        """A change of speed is suspected: the fast member predicts it, and nobody knows how well."""
        self.member = FAST
        self.intervals.widen()

    def close_trial(self) -> None:
        """Both members start level."""
        self.recent[:] = self.recent.min()

    def restart(self) -> None:
        """The slow member predicts until the fast one has shown what it can."""
        self.member, self.recent = SLOW, np.zeros(2)

    def restate(self, shift: Shift) -> None:
        """What other coefficients would have predicted of the same rows."""
        self.error.restate(shift)
        self.live_error.restate(shift)
        self.intervals.restate(shift)

    def add(self, other: Champion) -> None:
        """Errors of both streams."""
        self.error.add(other.error)
        self.live_error.add(other.live_error)
        self.intervals.add(other.intervals)


def _errors(block: Design, prediction: Floats) -> tuple[Floats, Floats]:
    """Relative errors and log(y / prediction) of predictions (n, 2), (2, n) each."""
    ratio = np.maximum(prediction.T, _TINY_US) / block.elapsed_us
    return np.abs(ratio - 1.0), -np.log(ratio)
