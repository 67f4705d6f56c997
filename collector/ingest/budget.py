"""Room for messages that are on their way in, in bytes, over all transports, with a share for each connection."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

T = TypeVar("T")

RECEIVED_AT_ONCE: Final = 4
"""Exports of the largest size that may be received at the same time, over all transports."""
RECEIVED_BYTES: Final = 32 << 20
"""The same in bytes, where exports may be larger than usual. What has come of a message lies in pieces and is put
together at its end, so that it takes twice as much for a moment."""
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
WASTED_HALF_LIFE_S: Final = 5.0
"""For how long it counts what a connection has reserved for messages that did not come: the pause of an exporter."""


class BudgetFull(Exception):
    """Too much is being received already."""


class ReceiveBudget:
    """Bytes of messages that are on their way in, over all transports; used in the loop.

    ``async with budget.receiving(connection, bytes):`` reserves them for the body of the block. It raises BudgetFull
    when there is no room in time, or when others need the room before the bytes are here, and TimeoutError when they
    take too long. Of those who wait, the connection goes first that has reserved least for messages that did not come,
    and of these the one that has waited longest: connections that are made anew and bring nothing overtake nobody.
    """

    def __init__(self, message_bytes_max: int) -> None:
        self._left = max(min(RECEIVED_AT_ONCE * message_bytes_max, RECEIVED_BYTES), message_bytes_max)
        self._share = int(RECEIVE_SHARE * self._left)
        self._held: Counter[str] = Counter()
        self._wasted: Counter[str] = Counter()
        self._halved_s = 0.0
        self._waiting: dict[str, deque[Receiving]] = {}  # in the order of each connection
        self._receiving: set[Receiving] = set()

    @asynccontextmanager
    async def receiving(self, connection: str, size_bytes: int) -> AsyncIterator[Receiving]:
        """Room for a message of at most so many bytes, reserved for a connection."""
        one = Receiving(self, connection, size_bytes)
        self._waiting.setdefault(connection, deque()).append(one)
        try:
            self._admit()
            if not one.admitted.done():
                upload_limit_s = self.upload_limit_s
                for each in self._receiving:
                    each.end_by(each.since_s + upload_limit_s)
            try:
                async with asyncio.timeout(RECEIVE_WAIT_S):
                    await one.admitted
            except TimeoutError:
                raise BudgetFull from None
            yield one
        finally:
            if one in self._receiving:
                self._receiving.remove(one)
                if not one.has_come:
                    self._wasted[one.connection] += one.size_bytes
                self._release(one, one.size_bytes)
            else:
                self._forget(one)
                self._admit()  # those behind it may fit

    @property
    def upload_limit_s(self) -> float:
        """How long a message may take to come; the more connections wait, the shorter."""
        if not self._waiting:
            return RECEIVE_TIMEOUT_S
        return max(STALLED_S * RECEIVED_AT_ONCE / max(len(self._waiting), RECEIVED_AT_ONCE), STALLED_MIN_S)

    def shrink(self, one: Receiving, size_bytes: int) -> None:
        """It has come, and needs no more than that."""
        spared_bytes, one.size_bytes, one.has_come = one.size_bytes - size_bytes, size_bytes, True
        self._release(one, spared_bytes)

    def _fits(self, one: Receiving) -> bool:
        if one.size_bytes > self._left or one.admitted.done():  # then its time was up, and it has not left yet
            return False
        held_bytes = self._held[one.connection]
        return not held_bytes or held_bytes + one.size_bytes <= self._share

    def _admit(self) -> None:
        """Let in those who wait as far as there is room, in the order of the class.

        Of each connection the first is looked at: hundreds of calls may wait.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._halved_s + WASTED_HALF_LIFE_S:
            self._halved_s = now_s
            self._wasted = Counter({name: wasted // 2 for name, wasted in self._wasted.items() if wasted})
        while fitting := [line[0] for line in self._waiting.values() if self._fits(line[0])]:
            one = min(fitting, key=lambda each: self._wasted[each.connection])
            self._forget(one)
            self._receiving.add(one)
            self._left -= one.size_bytes
            self._held[one.connection] += one.size_bytes
            one.since_s = now_s
            one.admitted.set_result(None)

    def _forget(self, one: Receiving) -> None:
        line = self._waiting.pop(one.connection)
        line.remove(one)
        if line:  # behind those of other connections
            self._waiting[one.connection] = line

    def _release(self, one: Receiving, size_bytes: int) -> None:
        self._left += size_bytes
        self._held[one.connection] -= size_bytes
        if not self._held[one.connection]:
            del self._held[one.connection]
        self._admit()


class Receiving:
    """One message; ``since_s`` is when it was let in, ``has_come`` whether it is here."""

    def __init__(self, budget: ReceiveBudget, connection: str, size_bytes: int) -> None:
        self.connection = connection
        self.size_bytes = size_bytes
        self.since_s = 0.0
        self.has_come = False
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._budget = budget
        self._timeout: asyncio.Timeout | None = None

    async def read(self, coming: Awaitable[T]) -> T:
        """Wait for the bytes; BudgetFull or TimeoutError if they take too long."""
        try:
            async with asyncio.timeout_at(self.since_s + self._budget.upload_limit_s) as self._timeout:
                return await coming
        except TimeoutError:
            if asyncio.get_running_loop().time() < self.since_s + RECEIVE_TIMEOUT_S:
                raise BudgetFull from None
            raise
        finally:
            self._timeout = None

    def end_by(self, when_s: float) -> None:
        """Others wait: its bytes have no more time than that."""
        timeout = self._timeout
        if timeout is not None and not timeout.expired() and when_s < (timeout.when() or when_s):
            timeout.reschedule(when_s)

    def shrink(self, size_bytes: int) -> None:
        """Give back what the message does not need, now that its size is known."""
        self._budget.shrink(self, size_bytes)
