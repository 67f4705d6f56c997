"""What people see of a step's coefficients beside the snapshot: the last rows, and their course over a day.

A course holds the published coefficients over a day of event time. Points are at least 14 s apart at first, and as far
as 192 of them reach over the course later; where there are more, every other one goes. Arrays are replaced, never
edited: a copy shares them.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np

from online.blocks import Design
from online.rls import RlsLearner
from online.rows import Floats, Ints
from online.state import Stateful

# Guard: memory, and what a page can show; 192 points are one in 7.5 minutes of a day.
ROWS_MAX, POINTS_MAX = 500, 192
# Derived: a day.
DAY_NS = 24 * 3_600 * 10**9
SPACING_NS = DAY_NS // POINTS_MAX
_FIRST_SPACING_NS = SPACING_NS >> 5


class HistoryView(NamedTuple):
    """What was remembered at one moment: the course, and the last rows, oldest first, in us per step.

    ``coefficients``, ``stderrs``: of each feature, at each of the times.
    """

    features: tuple[str, ...]
    at_ns: list[int]
    coefficients: list[list[float]]
    stderrs: list[list[float]]
    observed_us: list[float]
    predicted_us: list[float]


class StepHistory(Stateful):
    """Of a step's time.

    Attributes:
        features: p columns.
        at_ns: event time of each point, (k,).
        values: coefficients and standard errors there, (k, 2, p); 0 for an error that is not known.
    """

    SAVED = ("at_ns", "values")

    def __init__(self, features: tuple[str, ...]) -> None:
        self.features = features
        self._rows = np.empty((0, 2), np.float32)
        self.at_ns: Ints = np.empty(0, np.int64)
        self.values: Floats = np.empty((0, 2, len(features)))

    def __deepcopy__(self, _memo: object) -> StepHistory:
        return copy.copy(self)

    def learn(self, view: Design, log_ratio: Floats | None) -> None:
        """Rows, and log(y / (x beta F)) of them, (n,), if they were predicted."""
        if log_ratio is not None:
            observed_us = view.elapsed_us / view.steps
            rows = np.column_stack((observed_us, observed_us * np.exp(-log_ratio))).astype(np.float32)
            self._rows = np.concatenate((self._rows, rows))[-ROWS_MAX:]

    def record(self, at_ns: int, watcher: RlsLearner) -> None:
        """A block was learned, whose last row ended then: a point, if the newest is old and there was a first fit."""
        reach_ns = int(self.at_ns[-1] - self.at_ns[0]) if len(self.at_ns) else 0
        too_soon = len(self.at_ns) and at_ns < self.at_ns[-1] + max(_FIRST_SPACING_NS, reach_ns // POINTS_MAX)
        if too_soon or not watcher.started:
            return
        p = len(self.features)
        stderr = np.nan_to_num(watcher.infer().stderr[:p])
        kept = np.flatnonzero(self.at_ns > at_ns - DAY_NS)
        kept = kept[::2] if len(kept) >= POINTS_MAX else kept
        self.at_ns = np.append(self.at_ns[kept], at_ns)
        self.values = np.concatenate((self.values[kept], [[watcher.beta[:p], stderr]]))

    def view(self) -> HistoryView:
        """As of now, for any thread."""
        course, rows = self.values.transpose(1, 2, 0).tolist(), self._rows.T.tolist()
        return HistoryView(self.features, self.at_ns.tolist(), *course, *rows)
