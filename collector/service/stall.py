"""Is anything being learned? A process that receives, answers *ready* and learns nothing has to say so.

The clock is the process's own: spans accepted without a row learned for ten minutes. The reason is the first stage that
lets nothing through, asked in the order in which telemetry passes them. A quiet server is no stall.
"""

from __future__ import annotations

from dataclasses import dataclass

from collector.runtime import Clock
from collector.telemetry import Stall

STALLED_AFTER_S = 600.0
"""Longer than a row may wait in the join (``join_timeout_s``, three minutes) for what completes it."""


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """Counts since the process began, as the stages saw them."""

    batches_failed: int = 0
    spans_understood: int = 0
    rows_offered: int = 0
    rows_learned: int = 0


class StallWatch:
    """Fed after every batch; asked at any time from the same thread."""

    def __init__(self, clock: Clock, after_s: float = STALLED_AFTER_S) -> None:
        self._clock = clock
        self._after_ns = int(after_s * 1e9)
        self._since_ns: int | None = None
        self._newest_ns = 0
        self._at = WorkerProgress()
        self._now = WorkerProgress()

    def record(self, progress: WorkerProgress) -> None:
        """A batch of spans has been processed; counts so far."""
        now_ns = self._clock.monotonic_ns()
        self._now = progress
        quiet = now_ns - self._newest_ns > self._after_ns
        self._newest_ns = now_ns
        if self._since_ns is None or quiet or progress.rows_learned > self._at.rows_learned:
            self._since_ns, self._at = now_ns, progress

    def stalled(self) -> Stall | None:
        """Why nothing is learned, once that has lasted; None while all is well or nothing comes."""
        if self._since_ns is None or self._newest_ns - self._since_ns < self._after_ns:
            return None
        if self._clock.monotonic_ns() - self._newest_ns > self._after_ns:
            return None  # nothing comes any more
        now, at = self._now, self._at
        if now.batches_failed > at.batches_failed and now.spans_understood == at.spans_understood:
            return Stall.WORKER
        if now.spans_understood == at.spans_understood:
            return Stall.DECODE
        if now.rows_offered == at.rows_offered:
            return Stall.JOIN
        return Stall.LEARNER
