"""Short of memory: give back what is free, then learn what is pending, and say so; it passes by itself.

short              exports are refused, retryably (collector/runtime/filesystem.py); the queue is still learned from
after 3 s          what is pending is learned as it is, and steps behind it are let go of; again every second
STUCK_S            of refusing without a break, the process is not alive: only a restart helps
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from collector.runtime import Clock, Health, MemoryGuard
from collector.telemetry import Metrics, table

from .worker import IDLE_WAIT_S

NAME = "memory"
STUCK_S = 300.0
_TRY_EVERY_NS = 1_000_000_000
_PATIENCE_NS = 3_000_000_000
_CALM_NS = 10_000_000_000
"""Without being short for so long, it is over: one line in the log per shortage, however often it flickers."""

_log = logging.getLogger(__name__)


class MemoryRelief:
    """Asked by the worker after every turn, so that it may touch the pipeline.

    Attributes:
        problem: what is the matter, in words; empty while all is well.
    """

    def __init__(
        self,
        guard: MemoryGuard,
        shed: Callable[[], None],
        *,
        stuck_s: float = STUCK_S,
        metrics: Metrics,
        health: Health,
        clock: Clock,
    ) -> None:
        """``shed`` learns what is pending and lets go of what it was made of."""
        self.guard = guard
        self.problem = ""
        self._shed = shed
        self._stuck_s = stuck_s
        self._metrics = metrics
        self._health = health
        self._clock = clock
        self._watched = False
        self._short_from_start = False
        self._short_ns: int | None = None
        self._short_last_ns = 0
        self._tried_ns = 0

    def tick(self) -> None:
        """Look, and help if it is needed."""
        if self.guard.limit_bytes is None:
            return
        if not self._watched:
            self._health.register(NAME, self._stuck_s)
            self._watched, self._short_from_start = True, self.guard.is_short()
        now_ns = self._clock.monotonic_ns()
        if self.guard.is_short():
            self._help(now_ns)
            return
        self._short_ns, self._short_from_start = None, False
        self._health.check_in(NAME, IDLE_WAIT_S)
        if self.problem and now_ns - self._short_last_ns >= _CALM_NS:
            _log.info("memory is enough again: exports are accepted")
            self.problem = ""
            self._metrics.set(table.MEMORY_SHORT, 0)

    def _help(self, now_ns: int) -> None:
        if not self.problem:
            limit_mib = (self.guard.limit_bytes or 0) >> 20
            without_load = ", without any load; raise the limit" if self._short_from_start else ""
            self.problem = f"more than {limit_mib} MiB in use{without_load}: exports are refused"
            self._metrics.set(table.MEMORY_SHORT, 1)
            _log.warning("memory is short: %s", self.problem)
        self._short_ns = self._short_ns if self._short_ns is not None else now_ns
        self._short_last_ns = now_ns
        if now_ns - self._tried_ns < _TRY_EVERY_NS:
            return
        self._tried_ns = now_ns
        if self.guard.look() and now_ns - self._short_ns >= _PATIENCE_NS:
            self._shed()
            self.guard.look()
