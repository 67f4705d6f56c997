"""A suspected change of speed: one alarm, until the rows after it confirm or refute it.

    m_k   level of the k-th 32 rows after the alarm, against the references of before (levels.py)
    v_k   range of u - g / s of these rows: what is left of them if all are slower by g
    q    = max(1, least v / usual r)                        how much noisier these rows are than usual
    g    = max(g0 / 2, median e of the rows before)         log gain; g0: of the alarm, by 16 or 64 rows
    T    = sum of (min(m_k, 1.5 L_k) - L_k / 2) / w         L_k = g mean (1 / s)
    confirmed   when T >= 9 q, never was higher, k >= 2 q, the change began 136 q rows ago or more and the median of
                the last 8 e is beyond g / 2; with the gain exp(median e) of the rows since it began, or that of the
                later half of them where it is less: what raised the alarm may have been a burst
    refuted     when T falls by 3 below its highest, or stays undecided for 352 rows

T is how much likelier "changed by g" is than "did not change", in units that take neighbouring rows for one: a large
change is told from a burst by its duration, one of the size of the noise within 300 rows. A busy neighbour makes steps
slower and uneven, and must last the longer. The sign of g0 is taken out first. Bursts only slow down: during a trial
of a slow-down they look like it, during one of a speed-up like its end. A level takes at most 3 from the latter, and
it is refuted at a fall of 6. A change began where the sum of clip(e / g0, -1, 2) - 1/2 from there to the alarm is
greatest, among the last 64 rows. References: Wald, Sequential Analysis (1947); Hinkley (Biometrika 1970).
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
        rows, e: rows that do not fill a level yet, and the e of all since the change began.
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

    def began(self, e: list[float]) -> None:
        """From the rows up to the alarm, those since the change began."""
        ratio = np.minimum(np.maximum(np.array(e[::-1]) / self.gain, -1.0), 2.0)
        self.e = e[-1 - int(np.cumsum(ratio - 0.5).argmax()) :]

    def _gain_so_far(self) -> float:
        # The alarm's alone where there are no rows yet: max() keeps it beside the NaN of none.
        return max(0.5 * abs(self.gain), math.copysign(1.0, self.gain) * median_of(self.e))

    def learn(self, e: Floats, u: Floats, s: Floats) -> None:
        """Rows after the alarm that have a reference of before, (n,) each, in order of time."""
        sign, gain = math.copysign(1.0, self.gain), self._gain_so_far()
        self.e += e.tolist()
        least = -math.inf if sign > 0.0 else -self._settings.trial_fall
        for level, spread, inverse in self.rows.cut(sign * u, s, gain):
            expected = min(gain * inverse, U_MAX)
            self.evidence += max(least, (min(level, 1.5 * expected) - expected / 2.0) / self.usual)
            self.highest = max(self.highest, self.evidence)
            self.levels += 1
            self.least_range = min(self.least_range, spread) if self.levels > 1 else spread

    @property
    def confirmed(self) -> bool:
        """Whether the change is real."""
        settings = self._settings
        noisier = max(1.0, self.least_range / self.usual_range)
        if self.levels < noisier * settings.trial_levels_min or len(self.e) < noisier * settings.trial_rows_min:
            return False
        if not self.highest == self.evidence >= noisier * settings.trial_evidence:
            return False
        return math.copysign(1.0, self.gain) * median_of(self.e[-settings.group :]) > 0.5 * self._gain_so_far()

    @property
    def refuted(self) -> bool:
        """Whether there was none."""
        settings = self._settings
        fall = settings.trial_fall if self.gain > 0.0 else 2.0 * settings.trial_fall
        return self.highest - self.evidence >= fall or self.left <= 0

    def measured_gain(self) -> float:
        """Log gain by the rows since it began, or by their later half where that is less: bursts only slow down."""
        return min(median_of(self.e), median_of(self.e[len(self.e) // 2 :]))
