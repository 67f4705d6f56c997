"""One receiver's way in: who may call, what becomes of the bytes, and whether a call hangs in it.

A receiver checks in with :class:`~collector.runtime.Health` only while its listener and its way in are both well, so
that a deadlock behind a listener that still accepts is told as what it is. Exports wait for room at most
``WAIT_S``; one that is under way for ``HUNG_S`` waits for something that does not come (a lock, a disk), and only
a restart helps.
"""

from __future__ import annotations

import threading

from collector.ingest.access import TokenFile
from collector.ingest.intake import Intake, Refused
from collector.runtime import Clock
from collector.telemetry import Outcome, Transport

CHECK_EVERY_S = 20.0
HUNG_S = 60.0


class WayIn:
    """Called by the threads of one receiver; without tokens everybody may."""

    def __init__(self, transport: Transport, intake: Intake, clock: Clock, tokens: TokenFile | None = None) -> None:
        self.is_open = tokens is None
        """Everybody may export."""
        self._transport = transport
        self._intake = intake
        self._clock = clock
        self._tokens = tokens
        self._since_ns: dict[int, int] = {}

    def admits(self, authorization: str | None) -> bool:
        """Whether a caller with this ``Authorization`` header may export."""
        return self._tokens is None or self._tokens.accepts(authorization)

    def turn_away(self, outcome: Outcome) -> None:
        """Count a call that never got as far as an export."""
        self._intake.turn_away(self._transport, outcome)

    def offer(self, payload: bytes, peer: str, wait_s: float | None = None) -> Refused | None:
        """Take an export in (None), or say why not."""
        thread = threading.get_ident()
        self._since_ns[thread] = self._clock.monotonic_ns()
        try:
            return self._intake.offer(payload, peer, self._transport, wait_s)
        finally:
            del self._since_ns[thread]

    def flows(self) -> bool:
        """Whether no export has been under way for too long."""
        oldest_ns = min(tuple(self._since_ns.values()), default=None)  # a tuple: made in one go, without a lock
        return oldest_ns is None or self._clock.monotonic_ns() - oldest_ns <= HUNG_S * 1e9
