"""From learner to readers: one immutable snapshot, swapped by reference, and its copies on disk.

The worker thread publishes; the file is written by a thread of its own, so that a slow disk never makes a server's
exporter wait. Readers take the reference and need no lock.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path

from collector.runtime import REPORT_ONCE, Clock, Health, Task
from collector.telemetry import Metrics, table
from exporters.snapshot_file import (
    SNAPSHOT_NAME,
    published_snapshot,
    write_snapshot,
)
from exporters.wording import name_of
from online import ConfigSnapshot, Snapshot
from tracefit import Verdict

from .pipeline import Pipeline

WRITER = "snapshot-writer"
COST_SHARE = 0.1
"""Share of the worker's time for generations: with a thousand configurations they come less often than set."""
WRITE_TIMEOUT_S = 120.0
"""A write that takes longer hangs in the kernel."""

LOGGED_MAX = 1000
"""Past status changes that are remembered."""
_NUMBER = re.compile(r"\d[\d.,]*")

_log = logging.getLogger(__name__)


VerdictOf = Callable[[Snapshot, ConfigSnapshot], Verdict]
"""The client's verdict on one configuration of a snapshot."""


class Publisher:
    """Owns the published reference. ``tick`` belongs to the worker thread, ``current`` to everybody."""

    def __init__(
        self,
        pipeline: Pipeline,
        metrics: Metrics,
        clock: Clock,
        interval_s: float,
        verdict_of: VerdictOf,
    ) -> None:
        self._pipeline = pipeline
        self._metrics = metrics
        self._clock = clock
        self._interval_ns = int(interval_s * 1e9)
        self._published_revision: tuple[int, ...] = ()
        self._made_ns = -math.inf
        self._took_ns = 0
        self._generation = 0
        self._current: Snapshot | None = None
        self._news = StatusChanges(verdict_of)

    def current(self) -> Snapshot | None:
        """The newest generation; None until something was learned."""
        return self._current

    def resume(self, generation: int) -> None:
        """Go on after the generation that an earlier process published last."""
        self._generation = max(self._generation, generation)

    def tick(self, *, final: bool = False) -> None:
        """Publish a new generation if something has changed and the last one is old enough."""
        now_ns = self._clock.monotonic_ns()
        if not final and now_ns - self._made_ns < max(self._interval_ns, self._took_ns / COST_SHARE):
            return
        try:
            revision = self._pipeline.revision
            if revision == self._published_revision or not (revision[0] or self._pipeline.has_prior_prediction):
                return
            self._made_ns = now_ns
            self._current = self._pipeline.snapshot(self._clock.unix_nano(), self._generation + 1)
            self._generation += 1
            self._published_revision = revision
            self._news.log(self._current)
        except Exception:  # noqa: BLE001 -- a fault of the learner must not end the receiving
            self._metrics.add(table.WRITES, 1, "generation", "failed")
            _log.exception("snapshot could not be made")
            return
        self._metrics.add(table.WRITES, 1, "generation", "done")
        self._took_ns = self._clock.monotonic_ns() - now_ns


# --- news -----------------------------------------------------------------------------------------------------------


class StatusChanges:
    """Writes the problems of a snapshot's configurations to the log, each once in the life of the process.

        tiny: steps take 1.42 × as long since 14:03 UTC       a change of speed was confirmed, or its term is sure
        tiny: not usable: its engines disagree: ...           there is a doubt about a configuration
        tiny: engine 'b' takes 1.586 times as long as ...     an engine has another speed, or its term is sure

    Numbers inside of a doubt move all the time: two that differ in numbers alone are one.
    """

    def __init__(self, verdict_of: VerdictOf) -> None:
        self._verdict_of = verdict_of
        self._logged: dict[tuple[str, str], None] = {}
        """What the last snapshot said, and of what was said before the newest."""

    def log(self, snapshot: Snapshot) -> None:
        """Write a line for everything that was not logged yet."""
        said: dict[tuple[str, str], None] = {}
        for config in snapshot.configs:
            verdict = self._verdict_of(snapshot, config)
            for problem in verdict.problems(snapshot.created_unix_nano):
                key = config.config_id, problem.key or _NUMBER.sub("#", problem.text)
                said[key] = None
                if key not in self._logged:
                    _log.warning("%s: %s", name_of(config), problem.text, extra=REPORT_ONCE)
        over = [key for key in self._logged if key not in said]
        self._logged = dict.fromkeys(over[-LOGGED_MAX:]) | said


# --- files ----------------------------------------------------------------------------------------------------------


class SnapshotWriter:
    """Writes the current snapshot and its BLIS files every interval, if it is a new one, and once more at the end.

    Attributes:
        problem: which of them could not be written last, and why; empty while all is well.
    """

    def __init__(
        self,
        directory: Path,
        publisher: Publisher,
        interval_s: float,
        *,
        metrics: Metrics,
        health: Health,
    ) -> None:
        self.path = directory / SNAPSHOT_NAME
        self.problem = ""
        self._publisher = publisher
        self._metrics = metrics
        self._interval_s = interval_s
        self._written_generation = 0
        self._task = Task(WRITER, self._write_on_time, health=health, timeout_s=WRITE_TIMEOUT_S)

    def start(self) -> None:
        """Find what readers have seen, and begin."""
        published = published_snapshot(self.path)
        if published is not None:
            self._publisher.resume(published.generation)
        elif self.path.exists():
            _log.warning("%s cannot be read: generations begin at 1 again", self.path)
        self._task.start()

    def stop(self) -> bool:
        """End the timer and write the last generation; False if that could not be done."""
        self._task.stop(None)
        return self._write()

    def _write_on_time(self) -> float:
        self._write()
        return self._interval_s

    def _write(self) -> bool:
        snapshot = self._publisher.current()
        if snapshot is None or snapshot.generation == self._written_generation:
            return True
        report = write_snapshot(self.path.parent, snapshot)
        self._metrics.add(table.WRITES, len(report.written), "snapshot", "done")
        if report.errors:  # all of them again at the next turn
            self._metrics.add(table.WRITES, len(report.errors), "snapshot", "failed")
            name, reason = report.errors[0]
            self.problem = f"{len(report.errors)} snapshot files not written, the first: {name}: {reason}"
            _log.warning("%s", self.problem)
            return False
        self.problem = ""
        self._written_generation = snapshot.generation
        return True
