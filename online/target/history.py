"""What people see of a step's coefficients beside the snapshot: the last rows, and the course of a day.

A course holds the published coefficients over a day of event time, and what happened meanwhile:

    at_ns (m,)    values (m, 2 p + 2) = [beta, standard errors, median error, p90 error]    float32, NaN: not known

Points are at least 14 s apart at first. Whenever they are too many the distance doubles, up to 7.5 minutes, and
those nearer to the one before go; what is older than a day goes too. Arrays are replaced, never edited: copies
share them.
"""

from __future__ import annotations

import copy
import enum
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from online.blocks import Design
from online.change import Verdict
from online.rls import RlsLearner
from online.rows import Floats, Ints
from online.snapshot import ErrorSnapshot
from online.state import StateError, Stateful, Tree

from .published_prediction import PublishedPrediction

# Guard: memory, and what a page can show.
ROWS_MAX = 500
# Guard: memory; 192 points are one in 7.5 minutes of a day.
POINTS_MAX, CHANGES_MAX = 192, 32
# Derived: a day.
DAY_NS = 86_400_000_000_000
SPACING_NS = DAY_NS // POINTS_MAX
FIRST_SPACING_NS = SPACING_NS >> 5
# Derived: columns beside the coefficients, median and p90 error.
_ERRORS = 2


class ChangeKind(enum.StrEnum):
    """What may move coefficients."""

    SPEED = "speed"
    PREFILL_SPEED = "prefill speed"
    RESTART = "restart"
    CONFIGURATION = "configuration"


class Change(msgspec.Struct, frozen=True):
    """At which event time; ``gain`` of a change of speed: new time per old time."""

    at_ns: int
    kind: ChangeKind
    gain: float | None = None


class Course(Stateful):
    """Of one target.

    Attributes:
        names: of the p coefficients.
        at_ns: event times, growing.
        values: see the module's docstring.
        changes: in order of their time.
    """

    SAVED = ("at_ns", "values", "spacing_ns")
    UNKNOWN = frozenset({"values"})

    def __init__(self) -> None:
        self.names: list[str] = []
        self.at_ns: Ints = np.empty(0, np.int64)
        self.values: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = np.empty((0, _ERRORS), np.float32)
        self.spacing_ns = FIRST_SPACING_NS
        self.changes: list[Change] = []

    def __deepcopy__(self, memo: object) -> Course:
        """Arrays and lists are replaced, never edited: a copy has the same."""
        copied = Course()
        copied.names, copied.at_ns, copied.values = self.names, self.at_ns, self.values
        copied.spacing_ns, copied.changes = self.spacing_ns, self.changes
        return copied

    def to_state(self) -> Tree:
        """See Stateful."""
        return super().to_state() | {"names": [*self.names], "changes": msgspec.to_builtins(self.changes)}

    def from_state(self, state: Tree) -> None:
        """See Stateful."""
        self.names = msgspec.convert(state["names"], list[str])
        self.values = np.empty((0, 2 * len(self.names) + _ERRORS), np.float32)
        super().from_state(state)
        self.changes = msgspec.convert(state["changes"], list[Change])
        if not all(math.isfinite(change.gain or 0.0) for change in self.changes):
            raise StateError("a change without a finite gain")

    def restored(self) -> None:
        """Times grow, and each has its values."""
        if len(self.values) != len(self.at_ns) or (np.diff(self.at_ns) <= 0).any() or not self.spacing_ns:
            raise StateError("times do not grow, or have no values")

    def record(self, at_ns: int, names: Sequence[str], values: Callable[[], Floats]) -> None:
        """Take a point, :func:`course_values`, if the newest one is old enough, or something changed since it."""
        newest_ns = int(self.at_ns[-1]) if len(self.at_ns) else at_ns - self.spacing_ns
        changed = bool(self.changes) and newest_ns < self.changes[-1].at_ns <= at_ns
        if -DAY_NS < at_ns - newest_ns < self.spacing_ns and not changed:
            return
        with np.errstate(over="ignore"):
            point = values().astype(np.float32)
        point[np.isinf(point)] = np.nan  # beyond 3e38 nothing is shown, and no state would be read back
        before = slice(0, int(np.searchsorted(self.at_ns, at_ns)))  # all of them, but for stamps of a wrong year
        if self.names != [*names]:
            before = slice(0, 0)
            self.names = [*names]
        self.at_ns = np.append(self.at_ns[before], at_ns)
        self.values = np.concatenate([self.values[before].reshape(-1, len(point)), point[None]])
        self._thin()

    def _thin(self) -> None:
        while len(self.at_ns) > POINTS_MAX and self.spacing_ns < SPACING_NS:
            self.spacing_ns *= 2
            apart = _first_of_each(self.at_ns, self.spacing_ns)
            self.at_ns, self.values = self.at_ns[apart], self.values[apart]
        kept = slice(max(0, len(self.at_ns) - POINTS_MAX), len(self.at_ns))
        kept = slice(max(kept.start, int(np.searchsorted(self.at_ns, self.at_ns[-1] - DAY_NS))), kept.stop)
        self.at_ns, self.values = self.at_ns[kept], self.values[kept]

    def mark(self, kind: ChangeKind, at_ns: int, gain: float | None = None) -> None:
        """Remember what happened; the same again changes nothing."""
        self._keep(Change(at_ns, kind, gain))

    def mark_restart(self, at_ns: int) -> None:
        """An engine was restarted."""
        self.mark(ChangeKind.RESTART, at_ns)

    def _keep(self, change: Change) -> None:
        if change not in self.changes:
            self.changes = sorted([*self.changes, change], key=lambda each: each.at_ns)[-CHANGES_MAX:]

    def succeed(self, old: Course, at_ns: int) -> None:
        """Go on behind the course of the configuration that the server had until then."""
        self.add(old)
        self.mark(ChangeKind.CONFIGURATION, at_ns)

    def add(self, other: Course) -> None:
        """One that follows goes on where the other ends; of two at the same time the one with more points stays."""
        first, second = sorted((self, other), key=lambda each: each.at_ns[:1].tolist())
        if len(first.at_ns) and first.names == second.names and first.at_ns[-1] < second.at_ns[0]:
            at_ns, values = np.concatenate([first.at_ns, second.at_ns]), np.concatenate([first.values, second.values])
        else:
            longer = max((first, second), key=lambda each: len(each.at_ns))
            self.names, at_ns, values = longer.names, longer.at_ns, longer.values
        self.at_ns, self.values = at_ns, values
        self.spacing_ns = max(self.spacing_ns, other.spacing_ns)
        if len(at_ns):
            self._thin()
        for change in other.changes:
            self._keep(change)


def _first_of_each(at_ns: Ints, spacing_ns: int) -> list[int]:
    """Indices of times (m,) of which each is ``spacing_ns`` or more after the one before it, the oldest first."""
    kept = [0]
    for i in range(1, len(at_ns)):
        if at_ns[i] - at_ns[kept[-1]] >= spacing_ns:
            kept.append(i)
    return kept


def course_values(beta: Floats, stderr: Floats | None, error: ErrorSnapshot | None) -> Floats:
    """A point, (2 p + 2,); what is not known is NaN."""
    bars = np.full(len(beta), np.nan) if stderr is None else stderr
    errors = [np.nan, np.nan] if error is None else [error.median_ape, error.p90_ape]
    return np.concatenate([beta, bars, errors])


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
