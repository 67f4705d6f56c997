"""Event time stands still when nothing comes, so a source that is idle by the clock here is waited for no longer.

After every turn of the worker, at most once a second: whoever has sent nothing for ``idle_timeout_s`` is waited
for no longer, and what it holds is learned. Exports that came and were not read yet count as heard.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from collector.join import Pending
from collector.runtime import Clock
from collector.telemetry import Metrics, table

_LOOK_EVERY_NS = 1_000_000_000
_SERIES_ENGINES_MAX = 5
_LABEL_CHARS_MAX = 120


class IdleSources(Protocol):
    """What is asked of the pipeline."""

    def emit_idle(self, now_unix_ns: int) -> int | None:
        """Learn what idle sources hold; nanoseconds until the next one is idle, None without one."""
        ...

    def pending(self) -> list[Pending]:
        """What is held of sources that are not idle."""
        ...


class EventTime:
    """Belongs to the worker.

    Attributes:
        pending: what is held now; replaced, never edited.
    """

    def __init__(self, source: IdleSources, metrics: Metrics, clock: Clock, unread_ns: Callable[[], int]) -> None:
        """``unread_ns``: how long the oldest export has waited that came and was not read yet."""
        self._source = source
        self._metrics = metrics
        self._clock = clock
        self._unread_ns = unread_ns
        self._looked_ns: int | None = None
        self._due_ns: float = math.inf
        self.pending: tuple[Pending, ...] = ()

    def tick(self) -> None:
        """Emit idle sources, and say what is pending."""
        now_ns = self._clock.monotonic_ns()
        if self._looked_ns is not None and now_ns - self._looked_ns < _LOOK_EVERY_NS:
            return
        self._looked_ns = now_ns
        idle_in_ns = self._source.emit_idle(self._clock.unix_nano() - self._unread_ns())
        self._due_ns = math.inf if idle_in_ns is None else now_ns + idle_in_ns
        self.pending = tuple(self._source.pending())
        self._metrics.replace(table.PENDING, series_of(self.pending))

    def due_in_s(self) -> float:
        """Until the next source is idle, if nothing comes of it; inf without any."""
        return max(self._due_ns - self._clock.monotonic_ns(), _LOOK_EVERY_NS) / 1e9


def series_of(pending: tuple[Pending, ...]) -> dict[tuple[str, ...], float]:
    """What is pending of the engines that hold most, as series of the metric."""
    most = sorted(pending, key=lambda one: -(one.steps + one.requests + one.rows))[:_SERIES_ENGINES_MAX]
    return {
        (one.instance[:_LABEL_CHARS_MAX], what): float(number)
        for one in most
        for what, number in (("steps", one.steps), ("requests", one.requests), ("rows", one.rows))
        if number
    }
