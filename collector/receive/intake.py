"""The way in that every transport shares: envelope, admission, accounting.

The bracket: received = accepted + refused + failed, per transport, whatever happens in between. An empty export is a
success and enters nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from collector.runtime import LARGE_BLOCK_BYTES, MemoryGuard, give_back
from collector.telemetry import Metrics, Outcome, Transport, table

from .admission import HINT_MAX_S, AdmissionQueue, Refused
from .count import open_envelope
from .export_request import Export

FOREIGN_BYTES: Final = 1024
"""More than an export takes in memory beside its payload, of which there is next to nothing where spans were left out:
what waits in the queue stays bounded."""


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
        if len(payload) >= LARGE_BLOCK_BYTES:
            give_back()
        try:
            envelope = open_envelope(payload)
            if isinstance(envelope, Outcome):
                metrics.add(table.REQUESTS, 1, transport, envelope)
                return Refused(envelope)
            spans = envelope.spans
            metrics.add(table.RECEIVED_SPANS, spans, transport)
            export = Export(
                envelope.payload, peer, transport, spans, foreign=envelope.foreign, arrived_unix_ns=self._unix_nano()
            )
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
        size_bytes = len(export.payload) + (FOREIGN_BYTES if export.foreign.spans else 0)
        refused = self._queue.put(export, size_bytes, wait_s)
        if refused is not None:
            return refused
        try:
            self._sync()
        except OSError:
            # It is in the queue and will be learned; not acknowledged, it comes again and is told by its span ids.
            return Refused(Outcome.JOURNAL_FAILED, HINT_MAX_S)
        return None
