"""From bytes to the queue: whose message may come in, and the accounting of it.

**Room.** Messages on their way in are bounded in bytes, over all transports, with a share for each connection.

**Accounting.** Every call and every span is counted once, per transport, by what became of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from collector.decode import LARGE_BYTES, SMALL_BYTES, Export, count_spans
from collector.runtime import MemoryGuard
from collector.telemetry import Metrics, Outcome, Signal, Transport, table

from .forward import Forwarder
from .queue import BATCH_BYTES, RETRY_S, AdmissionQueue
from .status import Answer, answer

T = TypeVar("T")

_log = logging.getLogger(__name__)

RECEIVED_AT_ONCE: Final = 4
"""Exports of the largest size that may be received at the same time, over all transports."""
RECEIVED_BYTES: Final = 64 << 20
"""The same in bytes, where exports may be larger than usual."""
COPIES: Final = 2
"""Of a message that is on its way: what has come lies in pieces, and is put together at its end."""
RECEIVE_SHARE: Final = 0.25
"""Of them, what one connection may receive."""
RECEIVE_WAIT_S: Final = 2.0
"""How long a call waits for its turn to be received."""
RECEIVE_TIMEOUT_S: Final = 10.0
"""How long the bytes of a call may take to come: the deadline of an SDK's exporter."""
STALLED_S: Final = 1.0
"""The same while others wait for their turn: who announces much and sends nothing keeps nobody out."""
STALLED_MIN_S: Final = 0.05
"""The least of it, however many wait: what has come already has to be taken out of the library's hands."""
USED_HALF_LIFE_S: Final = 5.0
"""For how long it counts what a connection has received: the pause of an SDK's exporter."""
USED_BYTES_MIN: Final = 1 << 16
"""A connection that has used less is as good as a new one; an export has some 100 KiB."""


class BudgetFull(Exception):
    """Too much is being received already."""


class ReceiveBudget:
    """Bytes of messages that are on their way in, over all transports; used in the loop.

    ``async with budget.receiving(connection, bytes):`` reserves them for the body of the block. It raises BudgetFull
    when there is no room in time, or when others need the room before the bytes are here, and TimeoutError when they
    take too long. Of those who wait, the connection goes first that has used least of late, so that an honest exporter
    overtakes calls that bring nothing or very much.
    """

    def __init__(self, message_bytes_max: int) -> None:
        copies_bytes = COPIES * message_bytes_max
        self._room = self._left = max(min(RECEIVED_AT_ONCE * copies_bytes, RECEIVED_BYTES), copies_bytes)
        self._share = int(RECEIVE_SHARE * self._room)
        self._held: Counter[str] = Counter()
        self._used: Counter[str] = Counter()
        self._halved_s = 0.0
        self._waiting: dict[str, deque[_Receiving]] = {}  # in the order of each connection
        self._receiving: dict[_Receiving, None] = {}  # their bytes are not here yet

    @asynccontextmanager
    async def receiving(self, connection: str, size_bytes: int) -> AsyncIterator[_Receiving]:
        """Room for a message of at most so many bytes, reserved for a connection."""
        one = _Receiving(self, connection, min(COPIES * size_bytes, self._room))
        self._waiting.setdefault(connection, deque()).append(one)
        try:
            self._admit()
            if not one.admitted.done():
                upload_limit_s = self.upload_limit_s()
                for each in self._receiving:
                    each.end_by(each.since_s + upload_limit_s)
            try:
                async with asyncio.timeout(RECEIVE_WAIT_S):
                    await one.admitted
            except TimeoutError:
                raise BudgetFull from None
            yield one
        finally:
            self.received(one)
            if one.since_s:
                self._release(one.connection, one.size_bytes)
            else:
                self._forget(one)
                self._admit()  # those behind it may fit

    def received(self, one: _Receiving) -> None:
        """Its bytes are here, or will not come."""
        self._receiving.pop(one, None)

    def shrink(self, one: _Receiving, size_bytes: int) -> None:
        """It needs no more than that: what it has not used is as if it had never been reserved."""
        spared = one.size_bytes - size_bytes
        one.size_bytes = size_bytes
        self._used[one.connection] -= spared
        self._release(one.connection, spared)

    def upload_limit_s(self) -> float:
        """How long a message may take to come; the more connections wait, the shorter."""
        if not self._waiting:
            return RECEIVE_TIMEOUT_S
        return max(STALLED_S / max(1.0, len(self._waiting) / RECEIVED_AT_ONCE), STALLED_MIN_S)

    def _admit(self) -> None:
        """Let in those who wait as far as there is room, the connections that have used least first.

        Of each connection the first is looked at: one may have a thousand calls that wait.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s - self._halved_s >= USED_HALF_LIFE_S:
            self._halved_s = now_s
            self._used = Counter({name: used // 2 for name, used in self._used.items() if used >= USED_BYTES_MIN})
        while fitting := [line[0] for line in self._waiting.values() if self._fits(line[0])]:
            one = min(fitting, key=lambda each: self._used[each.connection])
            self._forget(one)
            self._left -= one.size_bytes
            self._held[one.connection] += one.size_bytes
            self._used[one.connection] += one.size_bytes
            self._receiving[one] = None
            one.since_s = now_s
            one.admitted.set_result(None)

    def _forget(self, one: _Receiving) -> None:
        line = self._waiting[one.connection]
        line.remove(one)
        if not line:
            del self._waiting[one.connection]

    def _fits(self, one: _Receiving) -> bool:
        if one.size_bytes > self._left or one.admitted.done():  # then its time was up, and it has not left yet
            return False
        held = self._held[one.connection]
        return not held or held + one.size_bytes <= self._share

    def _release(self, connection: str, size_bytes: int) -> None:
        self._left += size_bytes
        self._held[connection] -= size_bytes
        if not self._held[connection]:
            del self._held[connection]
        self._admit()


class _Receiving:
    """One message; ``since_s`` is when it was let in, 0 before."""

    def __init__(self, budget: ReceiveBudget, connection: str, size_bytes: int) -> None:
        self.connection = connection
        self.size_bytes = size_bytes
        self.since_s = 0.0
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._budget = budget
        self._timeout: asyncio.Timeout | None = None

    async def read(self, coming: Awaitable[T]) -> T:
        """Wait for the bytes; BudgetFull or TimeoutError if they take too long."""
        try:
            async with asyncio.timeout_at(self.since_s + self._budget.upload_limit_s()) as self._timeout:
                return await coming
        except TimeoutError:
            if asyncio.get_running_loop().time() < self.since_s + RECEIVE_TIMEOUT_S:
                raise BudgetFull from None
            raise
        finally:
            self._timeout = None
            self._budget.received(self)

    def shrink(self, size_bytes: int) -> None:
        """Give back what the message does not need, now that its size is known."""
        self._budget.shrink(self, min(size_bytes, self.size_bytes))

    def end_by(self, when_s: float) -> None:
        """Others wait: it has no more time than that."""
        timeout = self._timeout
        if timeout is not None and not timeout.expired() and when_s < (timeout.when() or when_s):
            timeout.reschedule(when_s)


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
    """

    def __init__(
        self,
        queue: AdmissionQueue,
        metrics: Metrics,
        memory: MemoryGuard | None = None,
        unix_nano: Callable[[], int] = lambda: 0,
        forward: Forwarder | None = None,
    ) -> None:
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

    async def offer(
        self, payload: bytes, peer: str, transport: Transport, wait_s: float | None = None
    ) -> Answer | None:
        """Take an export in (None), or say why not."""
        spans, outcome = 0, Outcome.FAILED
        try:
            counted = await self._count(payload)
            if isinstance(counted, Outcome):
                outcome = counted
                return answer(counted, RETRY_S if counted is Outcome.QUEUE_FULL else 0.0)
            spans = counted
            export = Export(payload, peer, transport, spans, arrived_unix_ns=self._unix_nano())
            refused = await self._admit(export, wait_s) if spans else None
            outcome = refused.outcome if refused is not None else Outcome.ACCEPTED
        finally:
            self._metrics.add(table.REQUESTS, 1, transport, outcome)
            if spans:
                self._metrics.add(table.SPANS, spans, transport, outcome)
        if self._forward is not None and refused is not None and refused.outcome in _NO_ROOM:
            self._forward.offer(Signal.TRACES, payload, spans)
            return None
        return refused

    @property
    def passes_on(self) -> bool:
        """Whether telemetry of a kind that is not learned from has somewhere to go."""
        return self._forward is not None

    async def take(
        self, signal: Signal, payload: bytes, peer: str, transport: Transport, wait_s: float | None = None
    ) -> Answer | None:
        """Take in what a receiver has read (None), or say why not, a fault of ours included.

        What is no trace is not learned from, and passed on.
        """
        if signal is not Signal.TRACES:
            self._metrics.add(table.REQUESTS, 1, transport, Outcome.ACCEPTED)
            if self._forward is not None:
                self._forward.offer(signal, payload)
            return None
        try:
            return await self.offer(payload, peer, transport, wait_s)
        except Exception:  # noqa: BLE001 -- its text would reach the client
            _log.exception("export failed")
            return answer(Outcome.FAILED)

    async def _count(self, payload: bytes) -> int | Outcome:
        """The spans of an export, or why it stays outside.

        The walk of a large one takes up to half a second, in a thread: several at once would only keep the loop
        waiting, and many that wait for it would hold the room of others.
        """
        if len(payload) <= SMALL_BYTES:
            return count_spans(payload)
        if len(payload) > LARGE_BYTES and self._walks >= WALKS_MAX:
            return Outcome.QUEUE_FULL
        self._walks += 1
        try:
            async with self._walk:
                return await asyncio.to_thread(count_spans, payload)
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
