"""The way in that every transport shares: envelope, admission, accounting.

The bracket: received = accepted + refused + failed, per transport, whatever happens in between. An empty export is a
success and enters nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from collector.runtime import MemoryGuard
from collector.telemetry import Metrics, Outcome, Transport, table

from .admission import HINT_MAX_S, AdmissionQueue, Refused
from .count import count_spans
from .export_request import Export


class Intake:
    """Called by the receivers' threads; ``unix_nano`` says when an export came in, 0 if that is not known."""

    def __init__(
        self,
        queue: AdmissionQueue[Export],
        metrics: Metrics,
        memory: MemoryGuard | None = None,
        sync: Callable[[], None] = lambda: None,
        unix_nano: Callable[[], int] = lambda: 0,
    ) -> None:
        self._queue = queue
        self._metrics = metrics
        self._memory = memory
        self._sync = sync
        self._unix_nano = unix_nano

    def turn_away(self, transport: Transport, outcome: Outcome) -> None:
        """A call that never got as far as an export."""
        self._metrics.add(table.REQUESTS, 1, transport, outcome)

    def offer(self, payload: bytes, peer: str, transport: Transport, wait_s: float | None = None) -> Refused | None:
        """Take an export in (None), or say why not."""
        metrics = self._metrics
        metrics.add(table.RECEIVED_BYTES, len(payload), transport)
        spans = 0
        try:
            counted = count_spans(payload)
            if isinstance(counted, Outcome):
                metrics.add(table.REQUESTS, 1, transport, counted)
                return Refused(counted)
            spans = counted
            metrics.add(table.RECEIVED_SPANS, spans, transport)
            export = Export(payload, peer, transport, spans, arrived_unix_ns=self._unix_nano())
            refused = self._admit(export, wait_s) if spans else None
        except BaseException:
            metrics.add(table.FAILED_SPANS, spans, transport)
            metrics.add(table.REQUESTS, 1, transport, Outcome.FAILURE)
            raise
        if refused is not None:
            metrics.add(table.REFUSED_SPANS, spans, transport, refused.reason)
            metrics.add(table.REQUESTS, 1, transport, refused.reason)
            return refused
        metrics.add(table.ACCEPTED_SPANS, spans, transport)
        metrics.add(table.REQUESTS, 1, transport, Outcome.SUCCESS if spans else Outcome.EMPTY)
        return None

    def _admit(self, export: Export, wait_s: float | None) -> Refused | None:
        if self._memory is not None and self._memory.is_short():
            self._queue.nudge()
            return Refused(Outcome.MEMORY, HINT_MAX_S)
        refused = self._queue.put(export, len(export.payload), wait_s)
        if refused is not None:
            return refused
        try:
            self._sync()
        except OSError:
            # It is in the queue and will be learned; not acknowledged, it comes again and is told by its span ids.
            return Refused(Outcome.JOURNAL_FAILED, HINT_MAX_S)
        return None
