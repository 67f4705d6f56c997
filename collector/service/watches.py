"""What the worker looks after between two batches: idle sources and memory.

Each belongs to the worker's thread, so that it may touch the pipeline.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from collector.join import Pending
from collector.runtime import Clock, Health, MemoryGuard
from collector.telemetry import Metrics, table

from .pipeline import Pipeline

CHECK_EVERY_NS = 1_000_000_000
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
        self._looked_ns = -math.inf
        self.pending: tuple[Pending, ...] = ()

    def tick(self) -> None:
        """Emit idle sources, and say what is pending."""
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._looked_ns < CHECK_EVERY_NS:
            return
        self._looked_ns = now_ns
        self._pipeline.emit_idle(self._clock.unix_nano() - self._queue_age_ns())
        self.pending = tuple(self._pipeline.pending())
        for what in ("steps", "requests", "rows"):
            self._metrics.set(table.PENDING, sum(getattr(one, what) for one in self.pending), what)


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
