"""Did only the steps with prefill change? They are a fifth of the rows, and a median over all rows does not see them.

    m = median of 8 consecutive u of rows with prefill         CUSUM as for all rows: an alarm is a suspicion
    g = exp(median of the 64 e after the alarm)                confirmed where all 4 groups of 16 of them lie beyond
                                                               half of the first gain and 6 %, on its side

u, e: online/drift/monitor.py. Suspicions end without a trace with the first group that lies elsewhere, and while a
change of all rows is suspected. References: Page (Biometrika 1954).
"""

from __future__ import annotations

import math

import numpy as np

from online.rows import Floats
from online.state import Finite, LikeFresh, saved

from .detectors import DriftSettings, make_detector
from .medians import median_of, medians_of

_GROUPS, _GROUP_ROWS = 4, 16


class PhaseWatch:
    """Detector and confirmation of one kind of rows."""

    STATE = saved(
        "phase_watch",
        detector=LikeFresh,
        waiting=list[Finite],
        recent=list[Finite],
        since=list[Finite],
        suspected=Finite,
    )

    def __init__(self, settings: DriftSettings) -> None:
        self._settings = settings
        self.detector = make_detector(settings)
        self.waiting: list[float] = []
        self.recent: list[float] = []
        self.since: list[float] = []
        self.suspected = 0.0

    def reset(self) -> None:
        """Forget every suspicion and the residuals that led to it."""
        self.detector.reset()
        self.waiting, self.recent, self.since, self.suspected = [], [], [], 0.0

    def learn(self, e: Floats, u: Floats) -> float:
        """Rows of this kind in order of time, (n,); the confirmed log gain, 0 for none."""
        if self.suspected:
            self.since.extend(e.tolist())
            return self._test_alarm()
        keep, size = self._settings.gain_rows, self.detector.group
        self.recent = [*self.recent, *e[-keep:].tolist()][-keep:]
        values = np.concatenate([self.waiting, u])
        full = len(values) // size
        self.waiting = values[full * size :].tolist()
        if self.detector.update(medians_of(values[: full * size], size)):
            gain = median_of(self.recent)
            self.reset()
            self.suspected = gain if abs(gain) >= self._settings.gate else 0.0
        return 0.0

    def _test_alarm(self) -> float:
        least = max(self._settings.gate, self._settings.phase_share * abs(self.suspected))
        sign = math.copysign(1.0, self.suspected)
        groups = len(self.since) // _GROUP_ROWS
        each = np.asarray(medians_of(np.asarray(self.since[: groups * _GROUP_ROWS]), _GROUP_ROWS))
        if (sign * each <= least).any():
            self.reset()
            return 0.0
        if groups < _GROUPS:
            return 0.0
        gain = median_of(self.since)
        self.reset()
        return gain
