"""What people see of a step's coefficients beside the snapshot: the last rows, and the course of a day."""

from __future__ import annotations

import copy
import math
from collections import deque
from typing import NamedTuple

import numpy as np

from online.blocks import Design
from online.change import Verdict
from online.rls import RlsLearner
from online.rows import Floats

from .course import Change, ChangeKind, Course, course_values
from .published_prediction import PublishedPrediction

# Guard: memory, and what a page can show.
ROWS_MAX = 500


class PredictedRows(NamedTuple):
    """Rows, oldest first, per step: each feature, the time observed and the time predicted (us)."""

    features: dict[str, list[float]]
    observed_us: list[float]
    predicted_us: list[float]


class RecentRows:
    """At most ``ROWS_MAX`` rows of one model, each predicted before it was learned, by the block.

        [x_i / l_i (p,)    y_i / l_i    (x_i beta F) / l_i]       per step, by beta and F as published before row i

    Kept by the block, as float32, so that a row costs next to nothing. Not saved.
    """

    __slots__ = ("_blocks", "_names", "_rows")

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._blocks: deque[np.ndarray[tuple[int, int], np.dtype[np.float32]]] = deque()
        self._rows = 0

    def __deepcopy__(self, memo: object) -> RecentRows:
        """Blocks are never edited: a copy has the same."""
        copied = RecentRows()
        copied._names, copied._blocks, copied._rows = self._names, self._blocks.copy(), self._rows
        return copied

    def learn(self, names: tuple[str, ...], view: Design, log_ratio: Floats) -> None:
        """Rows (n, p) of the columns that are called so, and log(y / (x beta F)), (n,)."""
        if names != self._names:
            self._names, self._rows = names, 0
            self._blocks.clear()
        last = slice(max(0, len(view) - ROWS_MAX), len(view))
        p, steps = len(names), view.steps[last]
        block = np.empty((len(steps), p + 2), np.float32)
        block[:, :p] = view.x[last] / steps[:, None]
        block[:, p] = view.elapsed_us[last] / steps
        block[:, p + 1] = block[:, p] * np.exp(-log_ratio[last])
        self._blocks.append(block)
        self._rows += len(block)
        while self._rows - len(self._blocks[0]) >= ROWS_MAX:
            self._rows -= len(self._blocks.popleft())

    def predicted_rows(self) -> PredictedRows:
        """The rows, to be looked at."""
        if not self._blocks:
            return PredictedRows({}, [], [])
        *features, observed_us, predicted_us = np.concatenate(self._blocks)[-ROWS_MAX:].T.tolist()
        return PredictedRows(dict(zip(self._names, features, strict=True)), observed_us, predicted_us)


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
        if verdict in (Verdict.CONFIRMED, Verdict.PREFILL):
            kind = ChangeKind.PREFILL_SPEED if verdict is Verdict.PREFILL else ChangeKind.SPEED
            drift = watcher.drift
            self.course.mark(kind, drift.last_ns, drift.gain)

    def record(self, at_ns: int, watcher: RlsLearner | None, published: PublishedPrediction | None) -> None:
        """A block was learned, whose last row ended then; error bars exist once the first rows became statistics."""
        if not self._kept or watcher is None or not watcher.started:
            return
        names = watcher.features.names
        error = watcher.error if published is None else published.error

        def values() -> Floats:
            stderr = None if watcher.holding else watcher.diagnosis().stderr[: len(names)]
            return course_values(watcher.fit.beta[: len(names)], stderr, error.snapshot())

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
