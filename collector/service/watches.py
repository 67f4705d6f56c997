"""What the worker looks after between two batches: idle sources and memory.

Each belongs to the worker's thread, so that it may touch the pipeline.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable

from collector.join import Pending
from collector.runtime import Clock, MemoryGuard
from collector.telemetry import Metrics, table

from .pipeline import Pipeline

CHECK_EVERY_NS = 1_000_000_000
HYSTERESIS_NS = 3_000_000_000

_log = logging.getLogger(__name__)


class EventTime:
    """Emits what idle sources hold, since event time stands still when nothing comes.

    It looks at most once a second. What a source holds is learned after ``idle_timeout_s`` without telemetry; what only
    more telemetry could complete, after ``join_timeout_s``. Exports in the queue count as telemetry that came.

    Attributes:
        pending: what is held now, None while nothing is.
    """

    def __init__(self, pipeline: Pipeline, metrics: Metrics, clock: Clock, queue_age_ns: Callable[[], int]) -> None:
        """``queue_age_ns``: age of the oldest export in the queue."""
        self._pipeline = pipeline
        self._metrics = metrics
        self._clock = clock
        self._queue_age_ns = queue_age_ns
        self._looked_ns = -math.inf
        self.pending: Pending | None = None

    def tick(self) -> None:
        """Emit idle sources, and say what is pending."""
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._looked_ns < CHECK_EVERY_NS:
            return
        self._looked_ns = now_ns
        self._pipeline.emit_idle(self._clock.unix_nano() - self._queue_age_ns())
        held = self._pipeline.joiner.pending()
        for what in ("steps", "requests", "rows"):
            self._metrics.set(table.PENDING, getattr(held, what), what)
        self.pending = held if held.engines else None


class MemoryLimiter:
    """When memory is short, learns what is pending, drops the steps behind it, and reports that until it passes.

    short         exports are refused, retryably (collector/ingest/consumer.py); the queue is still learned from
    after 3 s     what is pending is learned as it is, and steps behind it are let go of; again every second

    Attributes:
        problem: what is the matter, in words; empty while all is well.
    """

    def __init__(self, guard: MemoryGuard, shed: Callable[[], None], clock: Clock) -> None:
        """``shed`` learns what is pending and lets go of what it was made of."""
        self.guard = guard
        self.problem = ""
        self._shed = shed
        self._clock = clock
        self._shed_ns = 0
        """When to shed next."""

    def tick(self) -> None:
        """Check memory, and shed some if need be."""
        now_ns = self._clock.monotonic_ns()
        if not self.guard.is_short():
            if self.problem:
                _log.info("memory is enough again: exports are accepted")
            self.problem = ""
        elif not self.problem:
            self.problem = f"more than {(self.guard.limit_bytes or 0) >> 20} MiB in use: exports are refused"
            _log.warning("memory is short: %s", self.problem)
            self._shed_ns = now_ns + HYSTERESIS_NS
        elif now_ns >= self._shed_ns:
            self._shed_ns = now_ns + CHECK_EVERY_NS
            self._shed()
            gc.collect()  # what waited refers to each other
