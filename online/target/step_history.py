"""What people see of a step's coefficients beside the snapshot: the last rows, and the course of a day."""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

from online.blocks import Design
from online.drift import Verdict
from online.prediction import PredictedRows, RecentRows
from online.rls import RlsLearner
from online.rows import Floats

from .course import Change, ChangeKind, Course, course_values
from .published_prediction import PublishedPrediction


class CoursePoint(NamedTuple):
    """What was published at one event time; None: not known."""

    at_ns: int
    coefficient: tuple[float | None, ...]
    stderr: tuple[float | None, ...]
    median_ape: float | None
    p90_ape: float | None


class StepHistory:
    """Of one target; ``kept``: targets that nobody looks at so closely keep nothing.

    Attributes:
        course: what is saved.
    """

    def __init__(self, *, kept: bool) -> None:
        self._kept = kept
        self._recent = RecentRows()
        self.course = Course()

    def learn(self, watcher: RlsLearner, view: Design, log_ratio: Floats | None, verdict: Verdict) -> None:
        """Rows, log(y / (x beta F)) of them (n,) if they were predicted, and what was found of the speed."""
        if not self._kept:
            return
        if log_ratio is not None:
            self._recent.learn(watcher.features.names, view, log_ratio)
        last_change = watcher.members.drift.last
        if last_change is not None and verdict in (Verdict.CONFIRMED, Verdict.PREFILL):
            kind = ChangeKind.PREFILL_SPEED if verdict is Verdict.PREFILL else ChangeKind.SPEED
            self.course.mark(kind, *last_change)

    def record(self, at_ns: int, watcher: RlsLearner | None, published: PublishedPrediction | None) -> None:
        """A block was learned, whose last row ended then; error bars exist once the first rows became statistics."""
        if not self._kept or watcher is None or not watcher.started:
            return
        names = watcher.features.names
        error = watcher.members.scores.error if published is None else published.shaped.error

        def values() -> Floats:
            stderr = None if watcher.startup.holding else watcher.diagnosis().stderr[: len(names)]
            return course_values(watcher.members.slow.beta[: len(names)], stderr, error.snapshot())

        self.course.record(at_ns, names, values)

    def view(self) -> HistoryView:
        """As of now, for any thread."""
        return HistoryView(copy.deepcopy(self._recent), copy.deepcopy(self.course))


class HistoryView:
    """What was remembered at one moment.

    Attributes:
        features: names of the coefficients.
        changes: what happened, in order of time.
    """

    def __init__(self, recent: RecentRows, course: Course) -> None:
        self.features = tuple(course.names)
        self.changes: list[Change] = course.changes
        self._recent = recent
        self._course = course

    def rows(self) -> PredictedRows:
        """The last rows that were predicted before they were learned, oldest first."""
        return self._recent.predicted_rows()

    def course(self) -> list[CoursePoint]:
        """Points in order of time."""
        p = len(self.features)
        rows = [[None if math.isnan(value) else value for value in row] for row in self._course.values.tolist()]
        return [
            CoursePoint(at_ns, tuple(row[:p]), tuple(row[p : 2 * p]), row[-2], row[-1])
            for at_ns, row in zip(self._course.at_ns.tolist(), rows, strict=True)
        ]
