"""What people see of a step's coefficients beside the snapshot: the last rows, and their course over a day.

A course holds the published coefficients over a day of event time. Points are at least 14 s apart at first, and as far
as 192 of them reach over the course later. Lists and arrays are replaced, never edited: a view stays as it was.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from online.blocks import Design
from online.rls import RlsLearner
from online.rows import Floats
from online.state import StateError, Tree

# Guard: memory, and what a page can show; 192 points are one in 7.5 minutes of a day.
ROWS_MAX, POINTS_MAX = 500, 192
# Derived: a day.
DAY_NS = 24 * 3_600 * 10**9
SPACING_NS = DAY_NS // POINTS_MAX
_FIRST_SPACING_NS = SPACING_NS >> 5


class HistoryPoint(NamedTuple):
    """What was published at one event time, by coefficient; None: not known."""

    at_ns: int
    coefficient: tuple[float | None, ...]
    stderr: tuple[float | None, ...]


class CoefficientHistory(msgspec.Struct):
    """Of one target: names of its coefficients, and points in order of their time."""

    names: tuple[str, ...] = ()
    points: list[HistoryPoint] = []

    @staticmethod
    def of_state(state: Tree) -> CoefficientHistory:
        """From the state file; StateError if it does not fit."""
        course = msgspec.convert(state, CoefficientHistory)
        points = course.points
        numbers = [number for point in points for number in (*point.coefficient, *point.stderr)]
        if not all(len(each.coefficient) == len(each.stderr) == len(course.names) for each in points):
            raise StateError("a point of other coefficients")
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise StateError("a number of the course is not finite")
        if not all(before.at_ns < after.at_ns for before, after in itertools.pairwise(points)):
            raise StateError("times of the course do not grow")
        return course

    def record(self, at_ns: int, names: Sequence[str], values: Callable[[], tuple[Floats, Floats]]) -> None:
        """Take a point of coefficients and standard errors, (p,) each, if the newest is old."""
        if self.points:
            oldest_ns, newest_ns = self.points[0].at_ns, self.points[-1].at_ns
            spacing_ns = max(_FIRST_SPACING_NS, (newest_ns - oldest_ns) // POINTS_MAX)
            if -DAY_NS < at_ns - newest_ns < spacing_ns:
                return
        beta, stderr = values()
        # Stamps of a wrong year aside, all points are before this one.
        points = [each for each in self.points if self.names == (*names,) and each.at_ns < at_ns]
        self.names, self.points = (*names,), [*points, HistoryPoint(at_ns, _known(beta), _known(stderr))]
        self._thin()

    def _thin(self) -> None:
        """Drop what is older than a day, and of too many points those nearest to the next one."""
        points = [each for each in self.points if each.at_ns >= self.points[-1].at_ns - DAY_NS]
        if len(points) > POINTS_MAX:
            spacing_ns = max(2 * (points[-1].at_ns - points[0].at_ns) // POINTS_MAX, 1)  # a file may tell any times
            points = [points[0], *{each.at_ns // spacing_ns: each for each in points[1:]}.values()]
        self.points = points


def _known(values: Floats) -> tuple[float | None, ...]:
    """Numbers, and None for what is not finite."""
    return tuple(value if math.isfinite(value) else None for value in values.tolist())


class HistoryView(NamedTuple):
    """What was remembered at one moment: the course, and the last rows, oldest first, in us per step."""

    features: tuple[str, ...]
    points: list[HistoryPoint]
    observed_us: list[float]
    predicted_us: list[float]


class StepHistory:
    """Of a step's time.

    Attributes:
        coefficients: what is saved.
    """

    def __init__(self) -> None:
        self._rows = np.empty((0, 2), np.float32)
        self.coefficients = CoefficientHistory()

    def __deepcopy__(self, _memo: object) -> StepHistory:
        """Of a copy that nobody asks for its history."""
        copied = copy.copy(self)
        copied.coefficients = copy.copy(self.coefficients)
        return copied

    def learn(self, view: Design, log_ratio: Floats | None) -> None:
        """Rows, and log(y / (x beta F)) of them, (n,), if they were predicted."""
        if log_ratio is not None:
            observed_us = view.elapsed_us / view.steps
            rows = np.column_stack((observed_us, observed_us * np.exp(-log_ratio))).astype(np.float32)
            self._rows = np.concatenate((self._rows, rows))[-ROWS_MAX:]

    def record(self, at_ns: int, watcher: RlsLearner) -> None:
        """A block was learned, whose last row ended then; error bars exist once the first rows became statistics."""
        names = watcher.features.names

        def values() -> tuple[Floats, Floats]:
            p = len(names)
            stderr = np.full(p, np.nan) if watcher.holding else watcher.diagnosis().stderr[:p]
            return watcher.fit.beta[:p], stderr

        if watcher.started:
            self.coefficients.record(at_ns, names, values)

    def view(self) -> HistoryView:
        """As of now, for any thread."""
        course, rows = self.coefficients, self._rows.T.tolist()
        return HistoryView(course.names, course.points, *rows)
