"""From bytes to the worker: what an export holds, whether there is room for it, and the accounting of both.

**Envelope.** A receiver counts the spans of an export before it answers: the accounting needs the number, and bytes
that do not decode are INVALID_ARGUMENT. A full parse costs 0.7 µs per step event, that with the slim schema a tenth.
Before anything is allocated for an export of more than ``SMALL_BYTES``, its lengths are walked, because 8 MiB of empty
spans are 4 million messages; from ``LARGE_BYTES`` on the fields of its spans are counted, too.

**Queue.** It is bounded in bytes, from admission until the worker is done with them, and one peer may hold a share of
them. An exporter has one call in flight, so a call that waits for room is flow control without loss; a refusal costs
the sender more than 2 s of patience. An export larger than the capacity enters an empty queue, or it never would.
The receivers put in the loop; the one worker takes in its thread, every ``batch_s`` or at ``batch_bytes``.

**Accounting.** received = accepted + refused + failed, per transport, whatever happens in between.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, Self, TypeVar

from google.protobuf import message

from collector.decode import SlimExport, wire
from collector.runtime import Clock, MemoryGuard
from collector.telemetry import Metrics, Outcome, Transport, table


class Export(NamedTuple):
    """One admitted ExportTraceServiceRequest; ``recording`` names the file in a replay."""

    payload: bytes
    peer: str
    transport: str
    spans: int
    recording: str = ""
    seq: int = 0
    """Number in the log; 0 = not in it."""
    arrived_unix_ns: int = 0
    """When it came in, by the clock here; 0 in a replay: nobody knows."""


SPANS_MAX: Final = 65_536
"""Spans, scopes and resources that one export may hold; an SDK batch is 512 spans."""

FIELDS_MAX: Final = 1 << 19
"""Fields looked at; 512 spans of 128 events have 72,000."""
SMALL_BYTES: Final = 2 * SPANS_MAX
"""Two bytes are the smallest message: up to here there cannot be too many, and a batch of an SDK is rarely larger."""
LARGE_BYTES: Final = 1 << 20
"""From here on the fields inside of spans are looked at, too; below, even empty events are too few to do harm."""

_CONTAINER_TAGS: Final = tuple(number << 3 | wire.BYTES for number in (1, 2, 2, 0))
"""By depth, the tag of the repeated field below: resource_spans, scope_spans, spans, and none that is looked into."""
_DEPTH_SPANS: Final = 2


def newest_end_unix_nano(payload: bytes) -> int:
    """The newest end of the spans of an export that decodes; 0 without spans."""
    export = SlimExport.FromString(payload)
    ends = (span.end_unix_nano for resource in export.items for scope in resource.items for span in scope.items)
    return max(ends, default=0)


def count_spans(payload: bytes) -> int | Outcome:
    """The number of spans of a serialised ExportTraceServiceRequest, or why it is none."""
    try:
        if len(payload) <= SMALL_BYTES:
            export = SlimExport.FromString(payload)
            return sum(len(scope.items) for resource in export.items for scope in resource.items)
        walk = _Walk(payload)
        walk.run(0, len(payload), 0)
        SlimExport.FromString(payload)
    except _TooMany as too_many:
        return too_many.verdict
    except (IndexError, ValueError, message.DecodeError):
        return Outcome.UNDECODABLE
    return walk.spans


class _TooMany(Exception):
    def __init__(self, verdict: Outcome) -> None:
        super().__init__(verdict)
        self.verdict = verdict


class _Walk:
    """From length to length, with a budget."""

    def __init__(self, data: bytes) -> None:
        self.spans = 0
        self._data = data
        self._into_spans = len(data) >= LARGE_BYTES
        self._containers_left = SPANS_MAX
        self._fields_left = FIELDS_MAX

    def run(self, at: int, end: int, depth: int) -> None:
        """Walk the fields of one message between two offsets."""
        wanted = _CONTAINER_TAGS[depth]
        counts_only = depth == _DEPTH_SPANS and not self._into_spans
        data = self._data
        while at < end:
            self._fields_left -= 1
            if self._fields_left < 0:
                raise _TooMany(Outcome.TOO_MANY_FIELDS)
            tag, body_at, at = wire.read_field(data, at)
            if at > end or tag & 7 in wire.GROUP:
                raise ValueError("a group, or a field that leaves its message")
            if tag != wanted:
                continue
            if counts_only and self._containers_left > 0:
                self._containers_left -= 1
                self.spans += 1
            else:
                self._enter(body_at, at, depth)

    def _enter(self, at: int, stop: int, depth: int) -> None:
        self._containers_left -= 1
        if self._containers_left < 0:
            raise _TooMany(Outcome.TOO_MANY_SPANS)
        if depth == _DEPTH_SPANS:
            self.spans += 1
        elif depth > _DEPTH_SPANS:
            raise ValueError("a field without a number")  # only that is entered here: nothing is wanted inside of spans
        if depth < _DEPTH_SPANS or self._into_spans:
            self.run(at, stop, depth + 1)


T = TypeVar("T")

WAIT_S: Final = 2.0
"""How long an export may wait for room; see above."""
BATCH_S: Final = 2.0
"""How long the worker lets exports gather: joining 64 steps costs as much as joining 1,000."""
BATCH_BYTES: Final = 256 << 10
"""So many bytes are taken without waiting; a batch of an SDK has some 100 KiB."""
TAKE_BYTES: Final = 2 << 20
"""Most bytes that are taken in one turn: larger is hardly cheaper and delays what is published."""
PEER_SHARE: Final = 0.5
"""Of the capacity, what the exports of one address may hold."""
HINT_MIN_S: Final = 0.5
HINT_MAX_S: Final = 1.9
"""Bounds of the retry hint: five sleeps of 1.9 s fit the 10 s budget of the Python exporter; a shorter one than 0.5 s
uses its six attempts up before the queue has moved."""

_RATE_SMOOTHING: Final = 0.2


@dataclass(frozen=True, slots=True)
class Refused:
    """An export stays outside; ``retry_after_s`` is when there should be room again."""

    reason: Outcome
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class QueueBatch(Generic[T]):
    """What the worker takes at once; it hands it back with ``done``. ``waited_ns`` is the oldest's wait."""

    items: tuple[T, ...]
    size_bytes: int
    waited_ns: int
    peers: tuple[tuple[str, int], ...] = ()
    """By address, the bytes of it."""


class _Queued(NamedTuple):
    item: object
    size_bytes: int
    since_ns: int
    peer: str


class AdmissionQueue(Generic[T]):
    """A FIFO between the receivers, in the loop, and the worker, in its thread.

    Args:
        clock: for rates and waits.
        capacity_bytes: most bytes from admission until the worker is done.
        wait_s: how long ``put`` waits for room.
        record: writes an item down before it may enter; under the lock, so that numbers are in queue order.
        batch_s: how long the oldest export may wait for others.
        batch_bytes: bytes that wait for no others.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        capacity_bytes: int,
        wait_s: float = WAIT_S,
        record: Callable[[T], T | Outcome] = lambda item: item,
        batch_s: float = 0.0,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._clock = clock
        self._wait_s = wait_s
        self._record = record
        self._batch_ns = int(batch_s * 1e9)
        self._batch_bytes = min(batch_bytes, capacity_bytes // 4)
        self._work = threading.Condition()
        """Its lock guards everything below."""
        self._items: deque[_Queued] = deque()
        self._queued_bytes = 0
        self._in_flight_bytes = 0
        self._peer_bytes: Counter[str] = Counter()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._lacks_room = False
        """Somebody found no room, and what was inside then has not all been taken."""
        self._closed = False
        self._drain_bytes_per_s = 0.0
        self._taken_ns = clock.monotonic_ns()

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for the worker."""
        return self._queued_bytes

    @property
    def in_flight_bytes(self) -> int:
        """Bytes admitted and not yet learned from: queued plus in the worker's hands."""
        return self._in_flight_bytes

    # --- the receivers' side ----------------------------------------------------------------------------------------

    async def put(self, item: T, size_bytes: int, wait_s: float | None = None, peer: str = "") -> Refused | None:
        """Admit an export (None), waiting for room for a while, or say why not."""
        refused = self.put_nowait(item, size_bytes, peer)
        if refused is None or refused.reason is not Outcome.QUEUE_FULL:
            return refused
        place = (asyncio.get_running_loop(), asyncio.Event())
        with self._work:
            self._waiting.add(place)
        try:
            async with asyncio.timeout(self._wait_s if wait_s is None else min(wait_s, self._wait_s)):
                while refused is not None and refused.reason is Outcome.QUEUE_FULL:
                    await place[1].wait()
                    place[1].clear()
                    refused = self.put_nowait(item, size_bytes, peer)
        except TimeoutError:
            pass
        finally:
            with self._work:
                self._waiting.discard(place)
        return refused

    def put_nowait(self, item: T, size_bytes: int, peer: str = "") -> Refused | None:
        """Admit an export (None) if there is room at this moment, or say why not."""
        with self._work:
            if self._closed:
                return Refused(Outcome.SHUTTING_DOWN)
            if not self._fits(size_bytes, peer):
                self._lacks_room = True
                self._work.notify()  # nobody waits for others while somebody waits for room
                return Refused(Outcome.QUEUE_FULL, self._hint_s())
            recorded = self._record(item)
            if isinstance(recorded, Outcome):
                return Refused(recorded, HINT_MAX_S)
            self._items.append(_Queued(recorded, size_bytes, self._clock.monotonic_ns(), peer))
            self._queued_bytes += size_bytes
            self._in_flight_bytes += size_bytes
            self._peer_bytes[peer] += size_bytes
            if len(self._items) == 1 or self._queued_bytes >= self._batch_bytes:
                self._work.notify()
        return None

    def close(self) -> None:
        """Nobody enters any more, and those who wait are told; what is inside can still be taken."""
        with self._work:
            self._closed = True
            self._wake_waiting()
            self._work.notify_all()

    def nudge(self) -> None:
        """The worker need not sleep on, although there is nothing for it to take: it has more to look after."""
        with self._work:
            self._work.notify()

    # --- the worker's side ------------------------------------------------------------------------------------------

    def take(self, bytes_max: int, timeout_s: float) -> QueueBatch[T] | None:
        """Exports that came together, oldest first, or None when there is no batch yet; may return early."""
        with self._work:
            if not self._items and not self._closed:
                self._work.wait(timeout_s)
            elif (ripe_in_s := self._ripe_in_s()) > 0.0:
                self._work.wait(min(timeout_s, ripe_in_s))
            if not self._items or self._ripe_in_s() > 0.0:
                return None
            self._taken_ns = self._clock.monotonic_ns()
            waited_ns = self._taken_ns - self._items[0].since_ns
            taken: list[_Queued] = []
            size_bytes = 0
            while self._items and (not taken or size_bytes + self._items[0].size_bytes <= bytes_max):
                taken.append(self._items.popleft())
                size_bytes += taken[-1].size_bytes
            self._queued_bytes -= size_bytes
            self._lacks_room = self._lacks_room and bool(self._items)
        peers: Counter[str] = Counter()
        for each in taken:
            peers[each.peer] += each.size_bytes
        return QueueBatch(tuple(each.item for each in taken), size_bytes, waited_ns, tuple(peers.items()))  # type: ignore[misc]

    def done(self, batch: QueueBatch[T]) -> None:
        """The worker is through with a batch: its bytes make room."""
        with self._work:
            elapsed_s = max((self._clock.monotonic_ns() - self._taken_ns) / 1e9, 1e-6)
            self._drain_bytes_per_s += _RATE_SMOOTHING * (batch.size_bytes / elapsed_s - self._drain_bytes_per_s)
            self._in_flight_bytes -= batch.size_bytes
            for peer, size_bytes in batch.peers:
                self._peer_bytes[peer] -= size_bytes
                if not self._peer_bytes[peer]:
                    del self._peer_bytes[peer]
            self._wake_waiting()

    def unread_ns(self) -> int:
        """How long the oldest export has been in here; 0 where there is none."""
        with self._work:
            return self._clock.monotonic_ns() - self._items[0].since_ns if self._items else 0

    @property
    def exhausted(self) -> bool:
        """Closed and empty: the worker may go home."""
        with self._work:
            return self._closed and not self._items

    def _fits(self, size_bytes: int, peer: str) -> bool:
        if self._in_flight_bytes == 0:
            return True
        held_bytes = self._peer_bytes[peer] if peer else 0
        fair = held_bytes == 0 or held_bytes + size_bytes <= PEER_SHARE * self.capacity_bytes
        return fair and self._in_flight_bytes + size_bytes <= self.capacity_bytes

    def _ripe_in_s(self) -> float:
        """How long the worker should leave alone what is queued."""
        if self._closed or self._lacks_room or self._queued_bytes >= self._batch_bytes or not self._items:
            return 0.0
        return max(self._items[0].since_ns + self._batch_ns - self._clock.monotonic_ns(), 0) / 1e9

    def _wake_waiting(self) -> None:
        for loop, event in self._waiting:
            loop.call_soon_threadsafe(event.set)

    def _hint_s(self) -> float:
        if self._drain_bytes_per_s <= 0.0:
            return HINT_MAX_S
        half_s = 0.5 * self.capacity_bytes / self._drain_bytes_per_s
        return min(max(half_s, HINT_MIN_S), HINT_MAX_S)


class Intake:
    """What every receiver does with an export, in the loop.

    Args:
        queue: where it goes.
        metrics: where it is counted.
        memory: while it is short, exports are refused.
        unix_nano: says when an export came in, 0 if that is not known.
    """

    def __init__(
        self,
        queue: AdmissionQueue[Export],
        metrics: Metrics,
        memory: MemoryGuard | None = None,
        unix_nano: Callable[[], int] = lambda: 0,
    ) -> None:
        self._queue = queue
        self._metrics = metrics
        self._memory = memory
        self._unix_nano = unix_nano

    def turn_away(self, transport: Transport, outcome: Outcome) -> None:
        """A call that never got as far as an export."""
        self._metrics.add(table.REQUESTS, 1, transport, outcome)

    async def offer(
        self, payload: bytes, peer: str, transport: Transport, wait_s: float | None = None
    ) -> Refused | None:
        """Take an export in (None), or say why not."""
        metrics = self._metrics
        metrics.add(table.RECEIVED_BYTES, len(payload), transport)
        spans = 0
        try:
            if len(payload) <= SMALL_BYTES:
                counted = count_spans(payload)
            else:  # the walk takes up to half a second
                counted = await asyncio.to_thread(count_spans, payload)
            if isinstance(counted, Outcome):
                metrics.add(table.REQUESTS, 1, transport, counted)
                return Refused(counted)
            spans = counted
            metrics.add(table.RECEIVED_SPANS, spans, transport)
            export = Export(payload, peer, transport, spans, arrived_unix_ns=self._unix_nano())
            refused = await self._admit(export, wait_s) if spans else None
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

    async def _admit(self, export: Export, wait_s: float | None) -> Refused | None:
        if self._memory is not None and self._memory.is_short():
            self._queue.nudge()
            return Refused(Outcome.MEMORY, HINT_MAX_S)
        address = export.peer.rpartition(":")[0]  # without the port, which every connection has of its own
        return await self._queue.put(export, len(export.payload), wait_s, address)


RECEIVED_AT_ONCE: Final = 8
"""Exports of the largest size that may be received at the same time, over all transports."""
RECEIVE_SHARE: Final = 0.25
"""Of them, what one connection may receive."""
RECEIVE_WAIT_S: Final = 2.0
"""How long a call waits for its turn to be received."""
RECEIVE_TIMEOUT_S: Final = 10.0
"""How long the bytes of a call may take to come: the deadline of an SDK's exporter."""
STALLED_S: Final = 1.0
"""The same while others wait for their turn: who announces much and sends nothing keeps nobody out."""


class ReceiveBudget:
    """Bytes of messages that are on their way in, over all transports; used in the loop.

    ``async with budget.receiving(peer, bytes):`` reserves them for the body of the block. It raises BudgetFull when
    there is no room in time, and TimeoutError when the block takes too long.
    """

    def __init__(self, message_bytes_max: int) -> None:
        self._left = RECEIVED_AT_ONCE * message_bytes_max
        self._share = int(RECEIVE_SHARE * self._left)
        self._peers: Counter[str] = Counter()
        self._receiving: dict[_Receiving, None] = {}  # the one that began first comes first
        self._waiting = 0
        self._room = asyncio.Event()

    def receiving(self, peer: str, size_bytes: int) -> _Receiving:
        """A context in which so many bytes are reserved for a connection."""
        return _Receiving(self, peer, size_bytes)

    async def enter(self, one: _Receiving) -> None:
        """Reserve, waiting for a while."""
        if not self._take(one):
            self._waiting += 1
            try:
                async with asyncio.timeout(RECEIVE_WAIT_S):
                    while not self._take(one):
                        self._hurry()
                        self._room.clear()
                        await self._room.wait()
            except TimeoutError:
                raise BudgetFull from None
            finally:
                self._waiting -= 1
        self._receiving[one] = None

    def leave(self, one: _Receiving) -> None:
        """Release what was reserved."""
        self.received(one)
        self._left += one.size_bytes
        self._peers[one.peer] -= one.size_bytes
        if self._peers[one.peer] <= 0:
            del self._peers[one.peer]
        self._room.set()

    def received(self, one: _Receiving) -> None:
        """Its bytes are here, or will not come."""
        self._receiving.pop(one, None)

    def _take(self, one: _Receiving) -> bool:
        held = self._peers[one.peer]
        if one.size_bytes > self._left or (held and held + one.size_bytes > self._share):
            return False
        self._left -= one.size_bytes
        self._peers[one.peer] = held + one.size_bytes
        return True

    def patience_s(self) -> float:
        """How long a message may take to come; the more wait, the shorter."""
        return STALLED_S / max(1.0, self._waiting / RECEIVED_AT_ONCE) if self._waiting else RECEIVE_TIMEOUT_S

    def _hurry(self) -> None:
        patience_s = self.patience_s()
        for each in self._receiving:
            each.end_by(each.since_s + patience_s)


class BudgetFull(Exception):
    """Too much is being received already."""


class _Receiving:
    def __init__(self, budget: ReceiveBudget, peer: str, size_bytes: int) -> None:
        self.peer = peer
        self.size_bytes = size_bytes
        self.since_s = 0.0
        self._budget = budget
        self._timeout: asyncio.Timeout | None = None

    async def __aenter__(self) -> Self:
        """Wait for room."""
        await self._budget.enter(self)
        self.since_s = asyncio.get_running_loop().time()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give the room back."""
        self._budget.leave(self)

    async def read(self, coming: Awaitable[T]) -> T:
        """Wait for the bytes; TimeoutError if they take too long."""
        try:
            async with asyncio.timeout_at(self.since_s + self._budget.patience_s()) as self._timeout:
                return await coming
        finally:
            self._timeout = None
            self._budget.received(self)

    def end_by(self, when_s: float) -> None:
        """Others wait: it has no more time than that."""
        timeout = self._timeout
        if timeout is not None and not timeout.expired() and when_s < (timeout.when() or when_s):
            timeout.reschedule(when_s)
