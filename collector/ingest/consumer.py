"""From bytes to the queue: whose message may come in, and the accounting of it.

Every call and every span is counted once, per transport, by what became of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from collector.decode import LARGE_BYTES, SMALL_BYTES, Export, read_span_ends
from collector.runtime import MemoryGuard
from collector.telemetry import Metrics, Outcome, Signal, Transport, table

from .access import TokenFile
from .budget import BudgetExceededError, ReceiveBudget, Receiving
from .forward import Forwarder
from .queue import NO_ROOM, ExportQueue
from .status import Answer, answer

_log = logging.getLogger(__name__)


ReadMessage = Callable[[Receiving], Awaitable[bytes | Answer]]
"""Waits for the message of a call; an answer says why it cannot be read."""


class ExportConsumer:
    """What every receiver does with an export, in the loop.

    Args:
        queue, metrics: where it goes, and where it is counted.
        memory: while it is short, exports are refused.
        unix_nano: says when an export came in, 0 if that is not known.
        tokens: who may send; None lets everybody.
        forward: passes on what the queue has no room for and what is not learned from. With it, exports for which there
            is no room are acknowledged, too: nothing of them is learned, and they are counted as refused.
        message_bytes_max: the largest message that is read.
    """

    def __init__(
        self,
        queue: ExportQueue,
        metrics: Metrics,
        memory: MemoryGuard = MemoryGuard(None, int),  # noqa: B008 -- it never is
        unix_nano: Callable[[], int] = lambda: 0,
        tokens: TokenFile | None = None,
        forward: Forwarder | None = None,
        message_bytes_max: int = 8 << 20,
    ) -> None:
        self.budget = ReceiveBudget(message_bytes_max)
        self.message_bytes_max = message_bytes_max
        self._forward = forward
        self._queue = queue
        self._metrics = metrics
        self._memory = memory
        self._tokens = tokens
        self._unix_nano = unix_nano
        self._looking = asyncio.Lock()
        self._looked_at_bytes = 0

    def count_call(self, transport: Transport, outcome: Outcome) -> None:
        """Count what became of a call, also of one that never got as far as an export."""
        self._metrics.add(table.REQUESTS, 1, transport, outcome)

    def lets_in(self, authorization: str | None) -> bool:
        """Whether this ``Authorization`` allows sending."""
        return self._tokens is None or self._tokens.accepts(authorization)

    @property
    def can_forward(self) -> bool:
        """Whether telemetry of a kind that is not learned from has somewhere to go."""
        return self._forward is not None

    async def receive(
        self, signal: Signal, transport: Transport, connection: str, size_bytes: int, read: ReadMessage
    ) -> Answer | None:
        """Take in the message of one call, and count what became of the call; returns None, or the refusal.

        It takes the share of a ``connection``, and has ``size_bytes`` at most.
        """
        refused: Answer | None = answer(Outcome.MEMORY)
        try:
            if not self._memory.is_short():
                async with self.budget.receiving(connection, size_bytes) as room:
                    body = await read(room)
                    refused = body if isinstance(body, Answer) else await self._take_in(signal, transport, room, body)
        except BudgetExceededError:
            refused = answer(Outcome.QUEUE_FULL, "too many messages are being received")
        except (TimeoutError, ConnectionError):
            refused = answer(Outcome.INCOMPLETE)
        except asyncio.CancelledError:  # its sender has left
            self.count_call(transport, Outcome.INCOMPLETE)
            raise
        except Exception:  # noqa: BLE001 -- a fault of ours, whose text would reach the client
            _log.exception("export failed")
            refused = answer(Outcome.FAILED)
        self.count_call(transport, Outcome.ACCEPTED if refused is None else refused.outcome)
        return refused

    async def _take_in(self, signal: Signal, transport: Transport, room: Receiving, payload: bytes) -> Answer | None:
        """Enqueue a message that has come, or pass it on; returns None, or the refusal."""
        self.budget.shrink(room, len(payload))
        spans = await self._count_spans(payload) if signal is Signal.TRACES else 0
        if isinstance(spans, Outcome):
            return answer(spans)
        export = Export(payload, room.connection, spans, arrived_unix_ns=self._unix_nano())
        refused = await self._enqueue(export, transport) if spans else None
        is_learned = signal is Signal.TRACES and (refused is None or refused.outcome not in NO_ROOM)
        if self._forward is not None and not is_learned:
            self._forward.enqueue(signal, payload, spans)
            return None
        return refused

    async def _enqueue(self, export: Export, transport: Transport) -> Answer | None:
        """Put an export into the queue, and count its spans by what becomes of it; returns None, or the refusal."""
        outcome = Outcome.FAILED
        try:
            refused = answer(Outcome.MEMORY) if self._memory.is_short() else await self._queue.put(export)
            outcome = Outcome.ACCEPTED if refused is None else refused.outcome
        except asyncio.CancelledError as left:  # its sender has left while it waited for room
            outcome = left.args[0].outcome
            raise
        finally:
            self._metrics.add(table.SPANS, export.spans, transport, outcome)
        return refused

    async def _count_spans(self, payload: bytes) -> int | Outcome:
        """Count the spans of an export, or say why it is none; of one that is not small in a thread.

        That may take a second. One at a time, since several would only keep the loop waiting. Large ones wait as far as
        they are not more than two of the largest size: they hold the room of others meanwhile.
        """
        if len(payload) <= SMALL_BYTES:
            ends = read_span_ends(payload)
        elif len(payload) > LARGE_BYTES and self._looked_at_bytes + len(payload) > 2 * self.message_bytes_max:
            return Outcome.QUEUE_FULL
        else:
            self._looked_at_bytes += len(payload)
            try:
                async with self._looking:
                    ends = await asyncio.to_thread(read_span_ends, payload)
            finally:
                self._looked_at_bytes -= len(payload)
        return ends if isinstance(ends, Outcome) else len(ends)
