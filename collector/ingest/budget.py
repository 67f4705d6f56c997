"""Room for messages that are on their way in, in bytes, over all transports; connections take turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Final, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

RECEIVED_AT_ONCE: Final = 4
"""Exports of the largest size that may be received at the same time, over all transports."""
RECEIVED_BYTES: Final = 32 << 20
"""The same in bytes, where exports may be larger than usual. What has come of a message lies in pieces and is put
together at its end, so that it takes twice as much for a moment."""
RECEIVE_WAIT_S: Final = 2.0
"""How long a call waits for its turn to be received."""
RECEIVE_TIMEOUT_S: Final = 10.0
"""How long the bytes of a call may take to come: the deadline of an SDK's exporter."""
CONTENDED_TIMEOUT_S: Final = 1.0
"""The same while others wait: a connection that announces much and sends nothing keeps nobody out."""
CONTENDED_TIMEOUT_MIN_S: Final = 0.05
"""Lower bound of that, however many wait: bytes that have come must still be read from the library."""
WASTED_HALF_LIFE_S: Final = 5.0
"""Half-life of the bytes that a connection has reserved and not sent: the pause of an exporter."""


class BudgetExceededError(Exception):
    """Too much is being received already."""


class Receiving:
    """One message of at most ``size_bytes``; it waits, or is received, since ``since_s``. ``time`` is its timeout."""

    def __init__(self, connection: str, size_bytes: int) -> None:
        self.connection = connection
        self.size_bytes = size_bytes
        self.since_s = asyncio.get_running_loop().time()
        self.time = asyncio.timeout(RECEIVE_WAIT_S)
        self.accepted = asyncio.Event()
        self.is_received = False

    async def read(self, coming: Awaitable[T]) -> T:
        """Wait for the bytes; BudgetExceededError or TimeoutError, out of the whole block, if they take too long."""
        message = await coming
        self.time.reschedule(None)
        return message


class ReceiveBudget:
    """Bytes of messages that are on their way in, over all transports; used in the loop.

    ``async with budget.receiving(connection, bytes):`` reserves them for the body of the block. The block raises
    BudgetExceededError when there is no room in time, or when others need the room before the bytes are here. It raises
    TimeoutError when the bytes take too long. Each connection has one message in here; its next one waits. Of those who
    wait, the connection goes first that has reserved least for messages that did not come, and of these the one that
    has waited longest: connections that are made anew and bring nothing overtake nobody.
    """

    def __init__(self, message_bytes_max: int) -> None:
        self._left = max(min(RECEIVED_AT_ONCE * message_bytes_max, RECEIVED_BYTES), message_bytes_max)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By connection, as long as somebody holds one or waits for it."""
        self._waiting: list[Receiving] = []
        self._receiving: set[Receiving] = set()
        self._wasted: Counter[str] = Counter()
        self._halved_s = 0.0

    @asynccontextmanager
    async def receiving(self, connection: str, size_bytes: int) -> AsyncIterator[Receiving]:
        """Room for a message of at most so many bytes, reserved for a connection."""
        one, turn = Receiving(connection, size_bytes), self._turns.setdefault(connection, asyncio.Lock())
        try:
            async with one.time, turn:
                try:
                    await self._wait_for_room(one)
                    yield one
                finally:
                    self._leave(one)
        except TimeoutError:
            if asyncio.get_running_loop().time() < one.since_s + RECEIVE_TIMEOUT_S:
                raise BudgetExceededError from None
            raise

    def shrink(self, message: Receiving, size_bytes: int) -> None:
        """Reduce a reservation to the size of the message, which has come."""
        self._left += message.size_bytes - size_bytes
        message.size_bytes, message.is_received = size_bytes, True
        self._admit()

    async def _wait_for_room(self, one: Receiving) -> None:
        self._waiting.append(one)
        self._admit()
        if not one.accepted.is_set():
            for each in self._receiving:
                when_s, end_s = each.time.when(), each.since_s + self._upload_limit_s
                if when_s is not None and end_s < when_s and not each.time.expired():
                    each.time.reschedule(end_s)
        await one.accepted.wait()

    @property
    def _upload_limit_s(self) -> float:
        """How long a message may take to come; the more connections wait, the shorter."""
        if not self._waiting:
            return RECEIVE_TIMEOUT_S
        return max(
            CONTENDED_TIMEOUT_S * RECEIVED_AT_ONCE / max(len(self._waiting), RECEIVED_AT_ONCE), CONTENDED_TIMEOUT_MIN_S
        )

    def _admit(self) -> None:
        """Let in those who wait as far as there is room, in the order of the class."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._halved_s + WASTED_HALF_LIFE_S:
            self._halved_s = now_s
            self._wasted = Counter({name: wasted // 2 for name, wasted in self._wasted.items() if wasted})
        # one whose time is up has not left yet
        while fitting := [each for each in self._waiting if each.size_bytes <= self._left and not each.time.expired()]:
            one = min(fitting, key=lambda each: self._wasted[each.connection])
            self._waiting.remove(one)
            self._receiving.add(one)
            self._left -= one.size_bytes
            one.since_s = now_s
            one.time.reschedule(now_s + self._upload_limit_s)
            one.accepted.set()

    def _leave(self, one: Receiving) -> None:
        if one not in self._receiving:
            self._waiting.remove(one)
            return
        self._receiving.remove(one)
        self._left += one.size_bytes
        if not one.is_received:
            self._wasted[one.connection] += one.size_bytes
        self._admit()
