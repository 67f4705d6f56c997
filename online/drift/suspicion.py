"""A suspected change of speed: one alarm, until the rows after it confirm or refute it.

    m_k   level of the k-th 32 rows after the alarm, against the references of before (levels.py)
    v_k   range of u - g / s of these rows: what is left of them if all are slower by g
    q    = max(1, least v / usual r)                        how much noisier these rows are than usual
    T    = sum of (min(m_k, 1.5 L_k) - L_k / 2) / w         L_k = g mean (1 / s), g: log gain of the alarm
    confirmed   when T >= 9 q, never was higher, and k >= 3 q, rounded down; with the gain exp(median e),
                or that of the later half of the rows where it is less: what raised the alarm may have been a burst
    refuted     when T falls by 3 below its highest, or stays undecided for 512 rows

T is how much likelier "changed by g" is than "did not change", in units that take neighbouring rows for one: a large
change is told from a burst within 96 rows, one of the size of the noise within 300. A busy neighbour makes steps
slower and uneven, and must last the longer. The sign of g is taken out first. Reference: Wald, Sequential Analysis
(1947).
"""

from __future__ import annotations

import math

import numpy as np

from online.blocks import CELLS
from online.rows import Floats, Mask
from online.state import Count, Finite, saved

from .detectors import U_MAX, DriftSettings
from .levels import RowLevels
from .medians import median_of


class Suspicion:
    """See the module's docstring.

    Attributes:
        gain: log of new time per old time, as the alarm had it.
        usual, usual_range: w and r.
        evidence, highest: T, and the highest T so far.
        levels, least_range: how many levels were counted, and the least v of them.
        left: rows until it is undecided.
        rows, e: rows that do not fill a level yet, and the e of all.
        old: cells whose reference is of the time before the change, (512,).
        alarm_ns: event time of the alarm.
    """

    STATE = saved(
        "suspicion",
        gain=Finite,
        usual=Finite,
        usual_range=Finite,
        evidence=Finite,
        highest=Finite,
        levels=Count,
        least_range=Finite,
        left=int,
        rows=RowLevels,
        e=list[Finite],
        old=Mask,
        alarm_ns=int,
    )

    def __init__(self, settings: DriftSettings) -> None:
        self._settings = settings
        self.gain, self.usual, self.usual_range = 0.0, 1.0, 1.0
        self.evidence = self.highest = self.least_range = 0.0
        self.levels = 0
        self.left = settings.trial_rows_max
        self.rows = RowLevels()
        self.e: list[float] = []
        self.old: Mask = np.zeros(CELLS, np.bool_)
        self.alarm_ns = 0

    def learn(self, e: Floats, u: Floats, s: Floats) -> None:
        """Rows after the alarm that have a reference of before, (n,) each, in order of time."""
        self.e += e.tolist()
        gain = abs(self.gain)
        for level, spread, inverse in self.rows.cut(math.copysign(1.0, self.gain) * u, s, gain):
            expected = min(gain * inverse, U_MAX)
            self.evidence += (min(level, 1.5 * expected) - expected / 2.0) / self.usual
            self.highest = max(self.highest, self.evidence)
            self.levels += 1
            self.least_range = min(self.least_range, spread) if self.levels > 1 else spread

    @property
    def confirmed(self) -> bool:
        """Whether the change is real."""
        settings = self._settings
        if self.levels < settings.trial_levels_min:
            return False
        noisier = max(1.0, self.least_range / self.usual_range)
        enough = self.levels >= int(noisier * settings.trial_levels_min)
        return enough and self.highest == self.evidence >= noisier * settings.trial_evidence

    @property
    def refuted(self) -> bool:
        """Whether there was none."""
        settings = self._settings
        fallen = self.highest - self.evidence >= settings.trial_fall
        return fallen or self.left <= 0

    def measured_gain(self) -> float:
        """Log gain by the rows since the alarm, or by their later half where that is less: bursts only slow down."""
        return min(median_of(self.e), median_of(self.e[len(self.e) // 2 :]))
