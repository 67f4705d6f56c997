"""Levels: where 32 consecutive rows lie beside their references, and how far from 0 such levels usually are.

    m    = mean of four medians of 8 consecutive u             u = e / s: online/drift/monitor.py
    v    = mean of four ranges of 8 consecutive u, second to seventh of the eight
    w   <- w + (1.2533 min(|m|, 3 w) - w) / min(k + 16, 256)   from 0.5, at least 0.25; k: levels so far
    r   <- r + (min(v, 3 r) - r) / min(k + 16, 256)            from 1.5
    S+, S- two-sided CUSUM of m / w, slack 1, limit 6             alarm (online/drift/detectors.py)

Rows share their noise: a neighbour on the host, a clock that wanders. Levels are therefore compared with what levels
of this machine usually are, and a change too small to stand out of single rows is found by its duration.
Guard: u is limited to 8 on either side, so w and r are between 0 and 20. Reference: Page (Biometrika 1954).
"""

from __future__ import annotations

import numpy as np

from online.rows import Floats
from online.state import Count, Finite, saved

from .detectors import U_MAX, Cusum, DriftSettings

_MEAN_ABS_TO_SD = 1.2533
_CLIP = 3.0
_FIRST_SIZE, _FIRST_RANGE = 0.5, 1.5
_FIRST_WEIGHT, _MEMORY = 16, 256
_EIGHT = 8
_LEVEL_EIGHTS = 4


class RowLevels:
    """Cuts rows into levels; what does not fill one waits."""

    STATE = saved("row_levels", u=list[Finite], s=list[Finite])

    def __init__(self) -> None:
        self.u: list[float] = []
        self.s: list[float] = []

    def cut(self, u: Floats, s: Floats, gain: float = 0.0) -> list[tuple[float, float, float]]:
        """m, v and the mean of 1 / s of every level that is complete; u, s (n,) in order of time.

        v is that of u - gain / s: rows that all changed by ``gain`` are as even as before, however s differs. Without
        a gain nobody asks for 1 / s, and it is 0.
        """
        u, s = np.concatenate([self.u, u]), np.concatenate([self.s, s])
        size = _EIGHT * _LEVEL_EIGHTS
        count = len(u) // size
        cut = count * size
        self.u, self.s = u[cut:].tolist(), s[cut:].tolist()
        if not count:
            return []
        eights = np.sort(u[:cut].reshape(count, _LEVEL_EIGHTS, _EIGHT), axis=2)
        levels = 0.5 * (eights[:, :, 3] + eights[:, :, 4]).sum(axis=1) / _LEVEL_EIGHTS
        inverse = np.zeros(count)
        if gain:
            even = u[:cut] - np.minimum(gain / s[:cut], U_MAX)
            eights = np.sort(even.reshape(count, _LEVEL_EIGHTS, _EIGHT), axis=2)
            inverse = (1.0 / s[:cut].reshape(count, size)).mean(axis=1)
        ranges = (eights[:, :, 6] - eights[:, :, 1]).sum(axis=1) / _LEVEL_EIGHTS
        return list(zip(levels.tolist(), ranges.tolist(), inverse.tolist(), strict=True))


class Levels:
    """Levels of all rows while nothing is suspected, their usual size, and the detector on them.

    Attributes:
        usual, usual_range: w and r.
    """

    STATE = saved("levels", rows=RowLevels, cusum=Cusum, usual=Finite, usual_range=Finite, learned=Count)

    def __init__(self, settings: DriftSettings) -> None:
        self._least = settings.level_min
        self.rows = RowLevels()
        self.cusum = Cusum(_EIGHT, settings.level_slack, settings.level_limit)
        self.usual, self.usual_range = _FIRST_SIZE, _FIRST_RANGE
        self.learned = 0

    @property
    def size(self) -> float:
        """What levels are compared with."""
        return max(self.usual, self._least)

    def learn(self, u: Floats, s: Floats) -> bool:
        """Rows (n,) in order of time; True = alarm."""
        relative = []
        usual, usual_range, learned = self.usual, self.usual_range, self.learned
        for level, spread, _ in self.rows.cut(u, s):
            relative.append(level / max(usual, self._least))
            rate = 1.0 / min(learned + _FIRST_WEIGHT, _MEMORY)
            usual += rate * (_MEAN_ABS_TO_SD * min(abs(level), _CLIP * usual) - usual)
            usual_range += rate * (min(spread, _CLIP * usual_range) - usual_range)
            learned += 1
        self.usual, self.usual_range, self.learned = usual, usual_range, learned
        return self.cusum.update(relative)

    def reset(self) -> None:
        """Start over, after an alarm; what is usual stays."""
        self.cusum.reset()
        self.rows = RowLevels()
