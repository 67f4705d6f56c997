"""From bytes to the queue: what an export holds, whether there is room, and the accounting of both.

What an admitted export is.

The envelope of an export: is it OTLP, how many spans does it hold. What is inside is the worker's business.

The handler has to know the number of spans for the accounting and to answer INVALID_ARGUMENT to bytes that do not
decode. A full parse costs 0.7 µs per step event, that with the slim schema a tenth; what the schema does not name is
checked for well-formed tags and lengths.

Before anything is allocated for an export of more than ``SMALL_BYTES``, its lengths are walked, because 32 MiB of empty
spans are 16 million messages. So are 32 MiB of empty events: from ``LARGE_BYTES`` on the fields of its spans are
counted, too.

May an export enter: a queue bounded by bytes, in which a full house makes the caller wait before it is refused.

An exporter has one call in flight, so a handler that waits is flow control without any loss, and a refusal costs the
sender far more than 2 s of patience (a retry sleeps at least as long). Bytes count from admission until the worker is
done with them, not only while they are queued. An export larger than the whole capacity enters an empty house:
otherwise it never would.

The way in that every transport shares: envelope, admission, accounting.

The bracket: received = accepted + refused + failed, per transport, whatever happens in between. An empty export is a
success and enters nothing.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

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
    """Number in the journal; 0 = not in it."""
    arrived_unix_ns: int = 0
    """When it came in, by the clock here; 0 in a replay, and in a journal of an earlier version: nobody knows."""


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
        try:
            counted = count_spans(payload)
            if isinstance(counted, Outcome):
                metrics.add(table.REQUESTS, 1, transport, counted)
                return Refused(counted)
            spans = counted
            metrics.add(table.RECEIVED_SPANS, spans, transport)
            export = Export(payload, peer, transport, spans, arrived_unix_ns=self._unix_nano())
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
        refused = self._queue.put(export, len(export.payload), wait_s)
        if refused is not None:
            return refused
        try:
            self._sync()
        except OSError:
            # It is in the queue and will be learned; not acknowledged, it comes again and is told by its span ids.
            return Refused(Outcome.JOURNAL_FAILED, HINT_MAX_S)
        return None
