"""May an export enter: a queue bounded by bytes, in which a full house makes the caller wait before it is refused.

An exporter has one call in flight, so a handler that waits is flow control without any loss, and a refusal costs the
sender far more than 2 s of patience (a retry sleeps at least as long). Bytes count from admission until the worker is
done with them, not only while they are queued. An export larger than the whole capacity enters an empty house:
otherwise it never would.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from collector.runtime import Clock
from collector.telemetry import Outcome

T = TypeVar("T")

WAIT_S = 2.0
"""How long an export may wait for room; see above."""
BATCH_BYTES = 2 << 20
"""Exports that are taken in one turn: larger is hardly cheaper and delays what is published."""
HINT_MIN_S = 0.5
HINT_MAX_S = 1.9
"""Bounds of the retry hint: five sleeps of 1.9 s fit the 10 s budget of the Python exporter; a shorter one than 0.5 s
uses its six attempts up before the queue has moved."""

_RATE_SMOOTHING = 0.2


@dataclass(frozen=True, slots=True)
class Refused:
    """An export stays outside; ``retry_after_s`` is when there should be room again."""

    reason: Outcome
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class QueueBatch(Generic[T]):
    """What the worker takes at once; it hands back ``size_bytes`` with ``done``. ``waited_ns`` is the oldest's wait."""

    items: tuple[T, ...]
    size_bytes: int
    waited_ns: int


class AdmissionQueue(Generic[T]):
    """A FIFO between the receivers' threads and the one worker."""

    def __init__(
        self,
        clock: Clock,
        *,
        capacity_bytes: int,
        wait_s: float = WAIT_S,
        waiters_max: int,
        record: Callable[[T], T | Outcome] = lambda item: item,
        gather_s: float = 0.0,
        gather_bytes: int = 1 << 19,
    ) -> None:
        """``record`` writes an item down before it may enter; under the lock, so that numbers are in queue order.

        ``gather_s``: how long an export may wait for others where nobody could see that it was learned from, while they
        are fewer bytes than ``gather_bytes``.
        """
        self.capacity_bytes = capacity_bytes
        self._clock = clock
        self._wait_s = wait_s
        self._waiters_max = waiters_max
        self._record = record
        self._waiters = 0
        self._items: deque[tuple[T, int, int]] = deque()
        self._queued_bytes = 0
        self._in_flight_bytes = 0
        self._gather_ns = int(gather_s * 1e9)
        self._many_bytes = min(gather_bytes, capacity_bytes // 4)
        self._gathers = False
        """The worker need not be told of less than ``_many_bytes``."""
        self._lacks_room = False
        """Somebody found no room, and what was inside then has not all been taken."""
        self._closed = False
        self._drain_bytes_per_s = 0.0
        self._taken_ns = clock.monotonic_ns()
        lock = threading.Lock()  # one for both conditions; guards everything above that changes
        self._room = threading.Condition(lock)
        self._work = threading.Condition(lock)

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for the worker."""
        return self._queued_bytes

    @property
    def in_flight_bytes(self) -> int:
        """Bytes admitted and not yet learned from: queued plus in the worker's hands."""
        return self._in_flight_bytes

    def put(self, item: T, size_bytes: int, wait_s: float | None = None) -> Refused | None:
        """Admit an export (None), waiting for room for a while, or say why not."""
        wait_s = self._wait_s if wait_s is None else min(wait_s, self._wait_s)
        with self._room:
            if not self._fits(size_bytes) and not self._closed and not self._await_room(size_bytes, wait_s):
                return Refused(Outcome.QUEUE_FULL, self._hint_s())
            if self._closed:
                return Refused(Outcome.SHUTTING_DOWN)
            recorded = self._record(item)
            if isinstance(recorded, Outcome):
                return Refused(recorded, HINT_MAX_S)
            self._items.append((recorded, size_bytes, self._clock.monotonic_ns()))
            self._queued_bytes += size_bytes
            self._in_flight_bytes += size_bytes
            if not self._gathers or self._queued_bytes >= self._many_bytes:
                self._work.notify()
        return None

    def take(self, batch_bytes_max: int, timeout_s: float, unseen_s: float = 0.0) -> QueueBatch[T] | None:
        """Several exports together (small ones are cheaper that way), or None when there was nothing in time.

        ``unseen_s``: for so long nobody can see what is learned, and a few may wait for others.
        """
        with self._work:
            seen_ns = self._clock.monotonic_ns() + int(unseen_s * 1e9)
            gathers = unseen_s > 0.0 and self._gather_ns > 0
            ripe_in_s = self._ripe_in_s(seen_ns)
            if ripe_in_s > 0.0:
                if gathers:
                    # who comes when one is due waits for nobody, and who comes before no longer than it may
                    ripe_in_s = min(ripe_in_s, unseen_s, self._gather_ns / 1e9)
                wait_s = min(timeout_s, ripe_in_s)
                self._gathers = gathers
                self._work.wait(wait_s)
                self._gathers = False
            if not self._items or self._ripe_in_s(seen_ns) > 0.0:
                return None
            self._taken_ns = self._clock.monotonic_ns()
            waited_ns = self._taken_ns - self._items[0][2]
            items: list[T] = []
            taken_bytes = 0
            while self._items and (not items or taken_bytes + self._items[0][1] <= batch_bytes_max):
                item, size_bytes, _ = self._items.popleft()
                items.append(item)
                taken_bytes += size_bytes
            self._queued_bytes -= taken_bytes
            self._lacks_room = self._lacks_room and bool(self._items)
            return QueueBatch(tuple(items), taken_bytes, waited_ns)

    def nudge(self) -> None:
        """The worker need not sleep on, although there is nothing for it to take: it has more to look after."""
        with self._work:
            self._work.notify()

    def done(self, size_bytes: int) -> None:
        """The worker is through with a batch: its bytes make room."""
        with self._room:
            elapsed_s = max((self._clock.monotonic_ns() - self._taken_ns) / 1e9, 1e-6)
            self._drain_bytes_per_s += _RATE_SMOOTHING * (size_bytes / elapsed_s - self._drain_bytes_per_s)
            self._in_flight_bytes -= size_bytes
            self._room.notify_all()

    def close(self) -> None:
        """Nobody enters any more, and those who wait are told; what is inside can still be taken."""
        with self._room:
            self._closed = True
            self._room.notify_all()
            self._work.notify_all()

    def unread_ns(self) -> int:
        """How long the oldest export has been in here; 0 where there is none."""
        with self._work:
            return self._clock.monotonic_ns() - self._items[0][2] if self._items else 0

    @property
    def exhausted(self) -> bool:
        """Closed and empty: the worker may go home."""
        with self._work:
            return self._closed and not self._items

    def _fits(self, size_bytes: int) -> bool:
        return self._in_flight_bytes == 0 or self._in_flight_bytes + size_bytes <= self.capacity_bytes

    def _ripe_in_s(self, seen_ns: int) -> float:
        """How long the worker should leave alone what is queued."""
        if self._closed:
            return 0.0
        if not self._items:
            return math.inf
        if self._queued_bytes >= self._many_bytes or self._lacks_room or self._waiters:
            return 0.0
        until_ns = min(self._items[0][2] + self._gather_ns, seen_ns)
        return max(until_ns - self._clock.monotonic_ns(), 0) / 1e9

    def _await_room(self, size_bytes: int, wait_s: float) -> bool:
        self._lacks_room = True
        self._work.notify()  # nobody waits for others while somebody waits for room, or will ask again
        if self._waiters >= self._waiters_max:
            return False  # a handler must stay free for health checks and for exports that fit
        self._waiters += 1
        try:
            return self._room.wait_for(lambda: self._closed or self._fits(size_bytes), timeout=max(wait_s, 0.0))
        finally:
            self._waiters -= 1

    def _hint_s(self) -> float:
        if self._drain_bytes_per_s <= 0.0:
            return HINT_MAX_S
        half_s = 0.5 * self.capacity_bytes / self._drain_bytes_per_s
        return min(max(half_s, HINT_MIN_S), HINT_MAX_S)
