"""What the status page remembers between generations: the course of the error, and when speed changed.

A snapshot knows only now. The history keeps, per configuration and target, a course of at most ``MAX_POINTS`` points
over the whole life of the process: when it is full every second point is dropped and the spacing doubles, so old times
stay visible at falling resolution and memory stays bounded (configs x targets x points).
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from online import Snapshot, TargetSnapshot

MAX_POINTS = 240
MAX_COURSES = 400
MAX_DRIFTS = 16
FIRST_SPACING_NS = 5_000_000_000


class Point(NamedTuple):
    """Error of the champion at one time."""

    unix_nano: int
    median_ape: float
    p90_ape: float


class Drift(NamedTuple):
    """One confirmed change of speed; gain is new time divided by old time."""

    unix_nano: int
    gain: float | None


class ErrorHistory(NamedTuple):
    """What a chart shows."""

    points: tuple[Point, ...]
    drifts: tuple[Drift, ...]


class _Track:
    def __init__(self) -> None:
        self.points: list[Point] = []
        self.drifts: list[Drift] = []
        self.spacing_ns = FIRST_SPACING_NS

    def add(self, point: Point) -> None:
        if self.points and point.unix_nano - self.points[-1].unix_nano < self.spacing_ns:
            return
        self.points.append(point)
        if len(self.points) > MAX_POINTS:
            self.points = self.points[::2]
            self.spacing_ns *= 2

    def mark(self, drift: Drift) -> None:
        if all(known.unix_nano != drift.unix_nano for known in self.drifts):
            self.drifts = [*self.drifts, drift][-MAX_DRIFTS:]


class History:
    """Courses by (config, target); safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tracks: dict[tuple[str, str], _Track] = {}
        self._generation: int | None = None

    def record(self, snapshot: Snapshot) -> None:
        """Take note of a generation; the same one again, and a configuration that left, cost nothing."""
        with self._lock:
            if snapshot.generation == self._generation:
                return
            self._generation = snapshot.generation
            alive = {(config.config_id, name) for config in snapshot.configs for name in config.targets}
            self._tracks = {key: track for key, track in self._tracks.items() if key in alive}
            for config in snapshot.configs:
                for name, target in config.targets.items():
                    self._record_target((config.config_id, name), target, snapshot.created_unix_nano)

    def _record_target(self, key: tuple[str, str], target: TargetSnapshot, now_unix_nano: int) -> None:
        if key not in self._tracks and len(self._tracks) >= MAX_COURSES:
            return
        track = self._tracks.setdefault(key, _Track())
        error = target.prediction_error
        if error is not None:
            track.add(Point(now_unix_nano, error.median_ape, error.p90_ape))
        if target.drift is not None and target.drift.last_unix_nano is not None:
            track.mark(Drift(target.drift.last_unix_nano, target.drift.gain))

    def course(self, config_id: str, target: str) -> ErrorHistory:
        """What is remembered of one target; empty if nothing is."""
        with self._lock:
            track = self._tracks.get((config_id, target))
            return ErrorHistory((), ()) if track is None else ErrorHistory(tuple(track.points), tuple(track.drifts))
