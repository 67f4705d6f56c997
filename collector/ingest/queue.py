"""The queue between the receivers, in the loop, and the one worker, in its thread.

It is bounded in bytes, from admission until the worker is done with them. One address may hold a share of them, and
large exports leave room for small ones. An exporter has one call in flight, so a call that waits for room, here or in
the log, is flow control without loss; a refusal costs the sender more than 2 s of patience. An export that is larger
than the capacity enters an empty queue, or it never would. A large one, which holds memory, does not wait. The worker
takes what is there every ``batch_s`` or at ``BATCH_BYTES``.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, NamedTuple

from collector.decode import Export
from collector.runtime import Clock
from collector.telemetry import Outcome

from .status import Answer, answer

WAIT_S: Final = 2.0
"""How long an export may wait for room; see above."""
BATCH_S: Final = 2.0
"""How long the worker lets exports gather: joining 64 steps costs as much as joining 1,000."""
BATCH_BYTES: Final = 256 << 10
"""So many bytes are taken without waiting; a batch of an SDK has some 100 KiB."""
SHARE: Final = 0.75
"""Of the capacity, what the exports of one address may hold, and all of more than ``BATCH_BYTES`` together."""
LARGE_SHARE: Final = 0.5
"""Of the capacity, what exports of more than ``BATCH_BYTES`` of one address may hold."""


NO_ROOM: Final = {Outcome.QUEUE_FULL, Outcome.LOG}
"""Outcomes of a valid export that only lacks room, here or in the log."""


class QueueBatch(NamedTuple):
    """What the worker takes at once; it hands it back with ``done``. ``waited_ns`` is the oldest's wait."""

    items: list[Export]
    waited_ns: int


class ExportQueue:
    """A FIFO between the receivers, in the loop, and the worker, in its thread.

    Args:
        clock: for waits.
        capacity_bytes: most bytes from admission until the worker is done.
        wait_s: how long ``put`` waits for room.
        record: writes an item down before it may enter; under the lock, so that numbers are in queue order.
        batch_s: how long the oldest export may wait for others.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        capacity_bytes: int,
        wait_s: float = WAIT_S,
        record: Callable[[Export], Export | Outcome] = lambda item: item,
        batch_s: float = 0.0,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._clock = clock
        self._wait_s = wait_s
        self._record = record
        self._batch_ns = int(batch_s * 1e9)
        self._batch_bytes = min(BATCH_BYTES, capacity_bytes // 4)
        self._work = threading.Condition()
        """Its lock guards everything below."""
        self._items: deque[tuple[Export, int]] = deque()
        """With the time when each came."""
        self._queued_bytes = 0
        self._address_bytes: Counter[str] = Counter()
        """Queued, or in the worker's hands."""
        self._room: Future[None] = Future()
        """Done when there may be more room than before."""
        self._awaited: tuple[Future[None], asyncio.Future[None]] | None = None
        """The one that was waited for last, and the same for the loop."""
        self._missed: Future[None] | None = None
        """The one that did not come in all the time of an export: nobody waits for it in a log that stays full."""
        self._closed = False

    @property
    def in_flight_bytes(self) -> int:
        """Bytes admitted and not yet learned from: queued plus in the worker's hands."""
        with self._work:
            return self._address_bytes.total()

    # --- the receivers' side ----------------------------------------------------------------------------------------

    async def put(self, item: Export) -> Answer | None:
        """Admit an export (None), waiting for room for a while if it is no large one, or say why not.

        Raises:
            CancelledError: the caller gave up while it waited; with the answer until then.
        """
        refused, first = None, self._room
        try:
            async with asyncio.timeout(self._wait_s):
                while True:
                    room = self._room  # before it looks: room may come while it does
                    refused = self.put_nowait(item)
                    if refused is None or refused.outcome not in NO_ROOM or self._is_large(item):
                        break
                    if refused.outcome is Outcome.LOG and room is self._missed:
                        break
                    await asyncio.shield(self._in_loop(room))  # others wait for it, too
        except TimeoutError:
            self._missed = room if room is first else self._missed
        except asyncio.CancelledError:
            raise asyncio.CancelledError(refused) from None
        return refused

    def _in_loop(self, room: Future[None]) -> asyncio.Future[None]:
        """The same for all who wait: each of its own would be held until there is room, which may be never."""
        if self._awaited is None or self._awaited[0] is not room:
            self._awaited = room, asyncio.wrap_future(room)
        return self._awaited[1]

    def put_nowait(self, item: Export) -> Answer | None:
        """Admit an export (None) if there is room at this moment, or say why not."""
        with self._work:
            if self._closed:
                return answer(Outcome.SHUTTING_DOWN)
            if not self._fits(item):
                return answer(Outcome.QUEUE_FULL)
            recorded = self._record(item)
            if isinstance(recorded, Outcome):
                self._work.notify()  # it is the worker who makes room in the log
                return answer(recorded)
            self._items.append((recorded, self._clock.monotonic_ns()))
            self._queued_bytes += len(item.payload)
            self._address_bytes[_address(item)] += len(item.payload)
            if len(self._items) == 1 or self._queued_bytes >= self._batch_bytes:
                self._work.notify()
        return None

    def retry(self) -> None:
        """Let those who wait look again, because there may be more room; from any thread."""
        with self._work:
            self._room.set_result(None)
            self._room = Future()

    def close(self) -> None:
        """Refuse all new exports and those that wait for room; queued ones can still be taken."""
        with self._work:
            self._closed = True
            self.retry()
            self._work.notify_all()

    # --- the worker's side ------------------------------------------------------------------------------------------

    def take(self, bytes_max: int, timeout_s: float) -> QueueBatch | None:
        """Exports that came together, oldest first, or None when there is no batch yet."""
        with self._work:
            if not self._items and not self._closed:
                self._work.wait(timeout_s)
            elif (ripe_in_s := self._ripe_in_s()) > 0.0:
                self._work.wait(min(timeout_s, ripe_in_s))
            if not self._items or self._ripe_in_s() > 0.0:
                return None
            taken, left_bytes = QueueBatch([], self.queue_age_ns()), bytes_max
            while self._items and (not taken.items or len(self._items[0][0].payload) <= left_bytes):
                item, _ = self._items.popleft()
                taken.items.append(item)
                left_bytes -= len(item.payload)
            self._queued_bytes -= bytes_max - left_bytes
            return taken

    def done(self, batch: QueueBatch) -> None:
        """Free the bytes of a batch that the worker has processed."""
        with self._work:
            for item in batch.items:
                self._address_bytes[_address(item)] -= len(item.payload)
            self._address_bytes = +self._address_bytes  # of who holds none, nothing is kept
            self.retry()

    def queue_age_ns(self) -> int:
        """Age of the oldest queued export; 0 if there is none."""
        with self._work:
            return self._clock.monotonic_ns() - self._items[0][1] if self._items else 0

    @property
    def exhausted(self) -> bool:
        """Whether the queue is closed and empty, so that the worker ends."""
        with self._work:
            return self._closed and not self._items

    def _is_large(self, item: Export) -> bool:
        return len(item.payload) > self._batch_bytes

    def _fits(self, item: Export) -> bool:
        size_bytes = len(item.payload)
        if not self.in_flight_bytes:
            return True
        share, room = (LARGE_SHARE, SHARE) if self._is_large(item) else (SHARE, 1.0)
        held_bytes = self._address_bytes[_address(item)]
        is_fair = held_bytes == 0 or held_bytes + size_bytes <= share * self.capacity_bytes
        return is_fair and self.in_flight_bytes + size_bytes <= room * self.capacity_bytes

    def _ripe_in_s(self) -> float:
        """How long the worker should leave alone what is queued."""
        if self._closed or self._queued_bytes >= self._batch_bytes or not self._items:
            return 0.0
        return max(self._batch_ns - self.queue_age_ns(), 0) / 1e9


def _address(export: Export) -> str:
    """Address of the sender without its port, which differs per connection."""
    return export.peer.rpartition(":")[0]
