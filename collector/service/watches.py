"""What the worker looks after between two batches: idle sources, a stall of learning, and memory.

Each belongs to the worker's thread, so that it may touch the pipeline.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from operator import add
from typing import NamedTuple

from collector.join import Pending
from collector.runtime import Clock, Health, MemoryGuard
from collector.telemetry import Counts, Metrics, Stall, table
from online import RowOutcome, Target

from .pipeline import Pipeline

CHECK_EVERY_NS = 1_000_000_000
SERIES_ENGINES_MAX = 5
LABEL_CHARS_MAX = 120

STALLED_AFTER_NS = 600_000_000_000
"""Longer than a row may wait in the join (``join_timeout_s``, three minutes) for what completes it."""
PAUSE_NS = 60_000_000_000
"""What a pause between two exports counts as at most: senders export every few seconds while they serve."""

MEMORY = "memory"
"""In health."""
LIVENESS_DEADLINE_S = 300.0
CHECK_IN_S = 5.0
"""The longest pause between two looks."""
HYSTERESIS_NS = 3_000_000_000

_log = logging.getLogger(__name__)


class EventTime:
    """Event time stands still when nothing comes, so a source that is idle by the clock here is waited for no longer.

    At most once a second: of whoever has sent nothing for ``idle_timeout_s``, what it told is learned, and after
    ``join_timeout_s`` what only more telemetry could have completed. Exports that came and were not read yet count as
    heard.

    Attributes:
        pending: what is held now; replaced, never edited.
    """

    def __init__(self, pipeline: Pipeline, metrics: Metrics, clock: Clock, queue_age_ns: Callable[[], int]) -> None:
        """``queue_age_ns``: how long the oldest export has waited that came and was not read yet."""
        self._pipeline = pipeline
        self._metrics = metrics
        self._clock = clock
        self._queue_age_ns = queue_age_ns
        self._looked_ns, self._due_ns = -math.inf, math.inf
        self.pending: tuple[Pending, ...] = ()

    def tick(self) -> None:
        """Emit idle sources, and say what is pending."""
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._looked_ns < CHECK_EVERY_NS:
            return
        self._looked_ns = now_ns
        idle_in_ns = self._pipeline.emit_idle(self._clock.unix_nano() - self._queue_age_ns())
        self._due_ns = math.inf if idle_in_ns is None else now_ns + idle_in_ns
        self.pending = tuple(self._pipeline.pending())
        most = sorted(self.pending, key=lambda one: -(one.steps + one.requests + one.rows))[:SERIES_ENGINES_MAX]
        series: dict[tuple[str, ...], float] = {
            (one.instance[:LABEL_CHARS_MAX], what): float(number)
            for one in most
            for what, number in (("steps", one.steps), ("requests", one.requests), ("rows", one.rows))
            if number
        }
        self._metrics.replace(table.PENDING, series)

    def due_in_s(self) -> float:
        """Until the next source is idle, if nothing comes of it; inf without any."""
        return max(self._due_ns - self._clock.monotonic_ns(), CHECK_EVERY_NS) / 1e9


class _Progress(NamedTuple):
    """Counts since the process began, as the stages saw them."""

    batches_failed: int = 0
    spans_understood: float = 0
    rows_offered: float = 0
    rows_learned: float = 0


class StallWatch:
    """Is anything being learned? A process that receives, answers *ready* and learns nothing has to say so.

    The clock is the process's own: spans accepted without a row learned for ten minutes, in which a pause counts as
    ``PAUSE_NS`` at most. The reason is the first stage that lets nothing through, asked in the order in which telemetry
    passes them. A quiet server is no stall.
    """

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._in_vain_ns = 0.0
        self._newest_ns = -math.inf
        self._at = self._now = _Progress()
        self._said: Stall | None = None

    def record(self, counts: Counts, *, failed: bool = False) -> None:
        """A batch of spans has been processed: what was counted of it, and whether that ended by an error of ours."""
        now_ns = self._clock.monotonic_ns()
        learned = sum(counts[table.ROWS, target, RowOutcome.LEARNED] for target in Target)
        new = (failed, counts[table.DECODED_SPANS, table.ACCEPTED], counts.total(table.ROWS), learned)
        self._now = _Progress(*map(add, self._now, new))
        pause_ns = now_ns - self._newest_ns
        self._newest_ns = now_ns
        if pause_ns > STALLED_AFTER_NS or learned:
            self._in_vain_ns, self._at = 0.0, self._now
        else:
            self._in_vain_ns += min(pause_ns, PAUSE_NS)

    def tick(self) -> None:
        """Say it if that has changed."""
        stalled = self.stalled()
        if stalled is self._said:
            return
        for reason in Stall:
            self._metrics.set(table.LEARNING_STALLED, reason is stalled, reason)
        if stalled is not None:
            _log.error("spans arrive and nothing is learned: %s", stalled)
        else:
            _log.info("learning goes on")
        self._said = stalled

    def stalled(self) -> Stall | None:
        """Why nothing is learned, once that has lasted; None while all is well or nothing comes."""
        silent_ns = self._clock.monotonic_ns() - self._newest_ns
        if self._in_vain_ns < STALLED_AFTER_NS or silent_ns > STALLED_AFTER_NS:
            return None
        now, at = self._now, self._at
        if now.spans_understood == at.spans_understood:
            return Stall.WORKER if now.batches_failed > at.batches_failed else Stall.DECODE
        return Stall.JOIN if now.rows_offered == at.rows_offered else Stall.LEARNER


class MemoryLimiter:
    """Short of memory: learn what is pending, let go of what it was made of, and say so; it passes by itself.

    short              exports are refused, retryably (collector/ingest/intake.py); the queue is still learned from
    after 3 s          what is pending is learned as it is, and steps behind it are let go of; again every second
    ``LIVENESS_DEADLINE_S``        of refusing without a break, the process is not alive: only a restart helps

    Attributes:
        problem: what is the matter, in words; empty while all is well.
    """

    def __init__(
        self,
        guard: MemoryGuard,
        shed: Callable[[], None],
        *,
        liveness_deadline_s: float = LIVENESS_DEADLINE_S,
        health: Health,
        clock: Clock,
    ) -> None:
        """``shed`` learns what is pending and lets go of what it was made of."""
        self.guard = guard
        self.problem = ""
        self._shed = shed
        self._health = health
        self._clock = clock
        self._short_from_start = guard.is_short()
        self._short_ns = self._tried_ns = 0
        if guard.limit_bytes is not None:
            health.register(MEMORY, liveness_deadline_s)

    def tick(self) -> None:
        """Look, and help if it is needed."""
        now_ns = self._clock.monotonic_ns()
        if self.guard.is_short():
            self._help(now_ns)
            return
        self._short_from_start = False
        self._health.check_in(MEMORY, CHECK_IN_S)
        if self.problem:
            _log.info("memory is enough again: exports are accepted")
            self.problem = ""

    def _help(self, now_ns: int) -> None:
        if not self.problem:
            limit_mib = (self.guard.limit_bytes or 0) >> 20
            without_load = ", without any load; raise the limit" if self._short_from_start else ""
            self.problem = f"more than {limit_mib} MiB in use{without_load}: exports are refused"
            _log.warning("memory is short: %s", self.problem)
            self._short_ns = now_ns
        if now_ns - self._tried_ns < CHECK_EVERY_NS:
            return
        self._tried_ns = now_ns
        if now_ns - self._short_ns >= HYSTERESIS_NS:
            self._shed()
