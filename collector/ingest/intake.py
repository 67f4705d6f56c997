"""From bytes to the queue: whose message may come in, and the accounting of it.

Every call and every span is counted once, per transport, by what became of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from collector.decode import LARGE_BYTES, SMALL_BYTES, Export, read_span_ends
from collector.runtime import MemoryGuard
from collector.telemetry import Metrics, Outcome, Signal, Transport, table

from .budget import BudgetFull, ReceiveBudget, Receiving
from .forward import Forwarder
from .queue import BATCH_BYTES, RETRY_S, RETRY_SOON_S, AdmissionQueue
from .status import Answer, answer

_log = logging.getLogger(__name__)

WALKS_MAX: Final = 2
"""Exports that large that are looked at or wait for it."""

_NO_ROOM: Final = {Outcome.QUEUE_FULL, Outcome.LOG}
"""Nothing is wrong with an export that is refused for these, and it is in memory already."""


class Intake:
    """What every receiver does with an export, in the loop.

    Args:
        queue: where it goes.
        metrics: where it is counted.
        memory: while it is short, exports are refused.
        unix_nano: says when an export came in, 0 if that is not known.
        forward: passes on what the queue has no room for and what is not learned from. With it, exports for which there
            is no room are acknowledged, too: nothing of them is learned, and they are counted as refused.
        message_bytes_max: the largest message that is read.
    """

    def __init__(
        self,
        queue: AdmissionQueue,
        metrics: Metrics,
        memory: MemoryGuard | None = None,
        unix_nano: Callable[[], int] = lambda: 0,
        forward: Forwarder | None = None,
        message_bytes_max: int = 8 << 20,
    ) -> None:
        self.budget = ReceiveBudget(message_bytes_max)
        self.message_bytes_max = message_bytes_max
        self._forward = forward
        self._queue = queue
        self._metrics = metrics
        self._memory = memory
        self._unix_nano = unix_nano
        self._walk = asyncio.Lock()
        self._walks = 0
        """Exports that are walked or wait for it."""

    def refuses(self) -> Answer | None:
        """Why nothing is taken at this moment, whatever it is: asked before a message is read."""
        if self._memory is None or not self._memory.is_short():
            return None
        self._queue.notify()
        return answer(Outcome.MEMORY, RETRY_S)

    def reject(self, transport: Transport, outcome: Outcome) -> None:
        """A call that never got as far as an export."""
        self._metrics.add(table.REQUESTS, 1, transport, outcome)

    @property
    def passes_on(self) -> bool:
        """Whether telemetry of a kind that is not learned from has somewhere to go."""
        return self._forward is not None

    async def receive(
        self,
        signal: Signal,
        transport: Transport,
        connection: str,
        size_bytes: int,
        read: Callable[[Receiving], Awaitable[bytes | Answer]],
        patience_s: Callable[[], float | None] = lambda: None,
    ) -> Answer | None:
        """Read a message as soon as there is room for it, and take it in (None), or say why not.

        Args:
            signal: what it tells.
            transport: how it comes.
            connection: whose share of the room it takes.
            size_bytes: most bytes that it may have.
            read: waits for the message; an answer says why it cannot be read.
            patience_s: asked when it is here: how long its sender waits for a place in the queue.
        """
        message: bytes | Answer | None = None
        try:
            if (refused := self.refuses()) is None:
                async with self.budget.receiving(connection, size_bytes) as receiving:
                    message = await read(receiving)
                    if not isinstance(message, Answer):
                        receiving.shrink(len(message))
                        return await self._take(signal, message, connection, transport, patience_s())
                    refused = message
        except BudgetFull:
            refused = answer(Outcome.QUEUE_FULL, RETRY_SOON_S, "too many messages are being received")
        except (TimeoutError, ConnectionError):
            refused = answer(Outcome.INCOMPLETE)
        except asyncio.CancelledError:
            if message is None:  # else it is counted as what became of it
                self.reject(transport, Outcome.INCOMPLETE)
            raise
        except Exception:  # noqa: BLE001 -- a fault of ours, whose text would reach the client
            _log.exception("export failed")
            refused = answer(Outcome.FAILED)
            if message is not None:  # it is counted as what became of it
                return refused
        self.reject(transport, refused.outcome)
        return refused

    async def _take(
        self, signal: Signal, payload: bytes, peer: str, transport: Transport, wait_s: float | None
    ) -> Answer | None:
        """Take in what was read; what is no trace is not learned from, and passed on."""
        if signal is not Signal.TRACES:
            self._metrics.add(table.REQUESTS, 1, transport, Outcome.ACCEPTED)
            if self._forward is not None:
                self._forward.enqueue(signal, payload)
            return None
        return await self.consume(payload, peer, transport, wait_s)

    async def consume(
        self, payload: bytes, peer: str, transport: Transport, wait_s: float | None = None
    ) -> Answer | None:
        """Take an export in (None), or say why not."""
        spans, outcome = 0, Outcome.FAILED
        try:
            ends = await self._read_span_ends(payload)
            if isinstance(ends, Outcome):
                outcome = ends
                return answer(outcome, RETRY_S if outcome is Outcome.QUEUE_FULL else 0.0)
            spans = len(ends)
            export = Export(payload, peer, transport, spans, arrived_unix_ns=self._unix_nano())
            refused = await self._admit(export, wait_s) if spans else None
            outcome = refused.outcome if refused is not None else Outcome.ACCEPTED
        except asyncio.CancelledError:  # its sender has left: while it was looked at, or while it waited for room
            outcome = Outcome.QUEUE_FULL if spans else Outcome.INCOMPLETE
            raise
        finally:
            self._metrics.add(table.REQUESTS, 1, transport, outcome)
            if spans:
                self._metrics.add(table.SPANS, spans, transport, outcome)
        if self._forward is not None and refused is not None and refused.outcome in _NO_ROOM:
            self._forward.enqueue(Signal.TRACES, payload, spans)
            return None
        return refused

    async def _read_span_ends(self, payload: bytes) -> list[int] | Outcome:
        """When the spans of an export ended, or why it stays outside.

        The walk of a large one takes up to half a second, in a thread: several at once would only keep the loop
        waiting, and many that wait for it would hold the room of others.
        """
        if len(payload) <= SMALL_BYTES:
            return read_span_ends(payload)
        if len(payload) > LARGE_BYTES and self._walks >= WALKS_MAX:
            return Outcome.QUEUE_FULL
        self._walks += 1
        try:
            async with self._walk:
                return await asyncio.to_thread(read_span_ends, payload)
        finally:
            self._walks -= 1

    async def _admit(self, export: Export, wait_s: float | None) -> Answer | None:
        refused = self.refuses()
        if refused is not None:
            return refused
        address = export.peer.rpartition(":")[0]  # without the port, which every connection has of its own
        size_bytes = len(export.payload)
        if size_bytes > BATCH_BYTES:
            return self._queue.put_nowait(export, size_bytes, address)
        return await self._queue.put(export, size_bytes, wait_s, address)
