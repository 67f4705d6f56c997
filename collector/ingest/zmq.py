"""Publishers over ZMQ: KV-cache events of vLLM, ForwardPassMetrics of several engines.

One SUB socket for each endpoint, read in the loop fifty times a second, and a bounded queue for the worker. Connecting
never waits: an endpoint that is not there yet, goes away or never answers costs nothing but its messages. What arrives
is decoded at once (token ids never leave a message), for ``_TURN_S`` at a time. What has not been read waits in libzmq,
then at the publisher. PUB drops silently, so a loss shows in the publisher's numbers only, and is counted.

A message is: topic (or nothing), sequence of 8 bytes, body. libzmq does not bound the number of its frames: while the
process has more memory than its limit, which exports alone do not bring about since they are refused before, the
sockets are closed. pyzmq is an optional dependency (extra ``kv``), imported where endpoints are configured.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Generic, NamedTuple, TypeVar

from collector.config import Config, ConfigError, Owned, parse_owned
from collector.decode import fpm, kv
from collector.decode.fpm import ForwardPass
from collector.decode.kv import KvBatch
from collector.runtime import Background, Clock, Health, SteadyClock
from collector.telemetry import Counts, Metrics, Outcome, Skip, table

QUEUE_MAX = 50_000
"""Messages that wait for the worker, moves of blocks in them counted in; beyond it the oldest go, counted. With its
first row the worker imports River, which takes seconds on a busy machine: five of 10,000 records, 15 MB, may wait."""
SOCKET_BYTES = 32 << 20
"""What libzmq holds of one kind, over all connections that were configured, if no message is too large. A frame of more
ends its connection."""
POLL_S = 0.02
"""How often sockets and memory are looked at; a local publisher sends 20 MB meanwhile."""
REOPEN_S = 1.0
"""How long the sockets stay closed where memory is over its limit: who fills it begins anew as soon as it can. It is
also how often connections that have ended are made anew."""
HEARTBEAT_MS = 20_000
"""How often libzmq asks whether a publisher is still there, which may be gone without a word."""
_GAP_MAX = 1_000_000
"""A larger gap in a publisher's numbers is no loss: at a thousand steps a second it lasts for a quarter of an hour."""
_RECONNECT_MS = 1_000
_TURN_S = 0.01
"""How long a socket is read before others have the loop."""
_SEQUENCE_BYTES = 8

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Feed(NamedTuple, Generic[T]):
    """One kind of message, by the key of its endpoints, and who reads one: endpoint, sequence, body, arrival.

    A body of more than ``body_bytes_max`` is left out. ``size_of`` tells how many places one takes in the queue.
    ``sequence_of``, where gaps are counted here, tells its stream and its number there.
    """

    key: str
    read: Callable[[Owned, bytes, bytes, int], T | Skip]
    body_bytes_max: int
    size_of: Callable[[T], int] = lambda _: 1
    sequence_of: Callable[[T], tuple[int, int]] | None = None


def _read_kv(endpoint: Owned, number: bytes, body: bytes, _unix_ns: int) -> KvBatch | Skip:
    return kv.read_payload(body, endpoint.address, int.from_bytes(number, "big"), endpoint.instance)


def _read_fpm(endpoint: Owned, _number: bytes, body: bytes, unix_ns: int) -> ForwardPass | Skip:
    """The wire has no time of day, so that of arrival counts.

    Who publishes on a socket of the file system is SGLang, which times the GPU and does not say so in its records.
    """
    times = "gpu" if endpoint.address.startswith((_GPU, _IPC)) else "host"
    return fpm.read_record(body, unix_ns, times, endpoint.instance, endpoint.address)


KV_FEED = Feed[KvBatch](
    "kv", _read_kv, 2 << 20, lambda batch: 1 + len(batch.moves), lambda batch: (batch.rank, batch.seq)
)
"""Of a step of 131,072 tokens a batch holds 0.7 MB of token ids and 0.3 MB of hashes."""
FPM_FEED = Feed[ForwardPass]("fpm", _read_fpm, 4 << 10)
_GPU, _IPC = "gpu+", "ipc://"


class _Subscription:
    """The socket of one endpoint, made in the loop; ConfigError where it cannot connect or bind."""

    def __init__(self, zmq: Any, context: Any, feed: Feed[Any], endpoint: Owned, high_water: int) -> None:
        self.address = endpoint.address.removeprefix(_GPU)
        self.endpoint = endpoint
        self._unfinished = b"", b""
        self._zmq = zmq
        self._socket = context.socket(zmq.SUB)
        for option, value in (
            ("RCVHWM", high_water),
            ("MAXMSGSIZE", SOCKET_BYTES),
            ("RECONNECT_IVL", _RECONNECT_MS),
            ("HEARTBEAT_IVL", HEARTBEAT_MS),
            ("IPV6", 1),
            ("SUBSCRIBE", b""),
        ):
            self._socket.setsockopt(getattr(zmq, option), value)
        # A publisher whose endpoint has no "*" connects (wire contract §7.1): then the other side binds.
        try:
            self._socket.bind(self.address) if "*" in self.address else self._socket.connect(self.address)
        except zmq.ZMQError as error:
            raise ConfigError(feed.key, f"{self.address}: {error.strerror}") from None
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)

    def connect_again(self) -> bool:
        """Connect again to a peer that broke the protocol, and say whether one did; to others libzmq connects again.

        Its monitor says so, the number of the event in two bytes.
        """
        event = b""
        with contextlib.suppress(self._zmq.Again):
            while True:
                event = self._monitor.recv_multipart(self._zmq.NOBLOCK)[0]
        if "*" in self.address or int.from_bytes(event[:2], sys.byteorder) != self._zmq.EVENT_DISCONNECTED:
            return False
        self._socket.disconnect(self.address)
        self._socket.connect(self.address)
        return True

    def messages(self) -> Iterator[tuple[bytes, bytes]]:
        """The last two frames, sequence and body, of what has come: for so long at most, and some frames at a time.

        A frame says whether more follow; ``recv_multipart`` asks the socket, which costs a fifth of a record.
        """
        now_s, receive, at_once = asyncio.get_running_loop().time, self._socket.recv, self._zmq.NOBLOCK
        until_s, (number, body) = now_s() + _TURN_S, self._unfinished
        while now_s() < until_s:
            try:
                frame = receive(at_once, copy=False)
            except self._zmq.Again:
                break
            number, body = body, frame.bytes
            if not frame.more:
                yield number, body
                number, body = b"", b""
        self._unfinished = number, body


class Subscriber(Generic[T]):
    """Subscribes to every endpoint of a feed in the loop; the worker takes what came. Without endpoints it is idle.

    ``is_short`` says whether the process has more memory than its limit. ConfigError where there are endpoints and
    pyzmq is not installed.
    """

    def __init__(
        self,
        feed: Feed[T],
        config: Config,
        metrics: Metrics,
        clock: Clock,
        health: Health | None = None,
        is_short: Callable[[], bool] = lambda: False,
    ) -> None:
        self._feed = feed
        self._endpoints = [parse_owned(text) for text in getattr(config, feed.key)]
        try:
            self._zmq: Any = import_module("zmq") if self._endpoints else None
        except ImportError:
            raise ConfigError(feed.key, "pyzmq is not installed: install tracefit's extra kv") from None
        self._metrics = metrics
        self._clock = SteadyClock(clock)
        self._task = Background(f"{feed.key}-receiver", health)
        self._is_short = is_short
        self._lock = threading.Lock()
        """Guards the queue; all else belongs to the loop."""
        self._queue: deque[T] = deque()
        self._queued = 0
        self._subscriptions: list[_Subscription] = []
        self._expected: dict[tuple[str, int], int] = {}
        """The next number of each stream of an address."""
        self._context: Any = None
        metrics.follow(table.SIZE, lambda: self._queued, feed.key)
        metrics.set(table.CAPACITY, QUEUE_MAX, feed.key)

    async def start(self) -> None:
        """Open the sockets and listen, whether or not anybody is there; ConfigError when that is impossible."""
        if self._endpoints:
            self._open()
            self._task.start(self._listen())

    async def stop(self) -> bool:
        """Listen no more, and close the sockets. Always True: nobody's message was acknowledged."""
        await self._task.stop()
        if self._context is not None:
            self._context.destroy(linger=0)
        return True

    def take(self) -> list[T]:
        """What came since the last call, in order of arrival."""
        with self._lock:
            taken, self._queue, self._queued = self._queue, deque(), 0
        return list(taken)

    def _open(self) -> None:
        zmq, feed, endpoints = self._zmq, self._feed, self._endpoints
        self._context = context = zmq.Context()
        high_water = max(SOCKET_BYTES // (feed.body_bytes_max * len(endpoints)), 1)
        self._subscriptions = [_Subscription(zmq, context, feed, each, high_water) for each in endpoints]

    async def _listen(self) -> None:
        """Read each socket in its turn, between which others have the loop.

        While memory is over its limit, let go of all that libzmq holds: a loss shows in the publisher's numbers.
        """
        now_s, key, due_s = asyncio.get_running_loop().time, self._feed.key, 0.0
        while True:
            if self._is_short():
                _log.warning("%s: memory is over its limit: all connections are closed for a second", key)
                self._context.destroy(linger=0)
                await asyncio.sleep(REOPEN_S)
                self._open()
            if is_due := now_s() >= due_s:
                due_s = now_s() + REOPEN_S
            for subscription in self._subscriptions:
                self._metrics.merge(self._accept(subscription))
                if is_due and subscription.connect_again():
                    self._metrics.add(table.MESSAGES, 1, key, Skip.UNDECODABLE)
                    _log.warning("%s: %s sent a frame of over 32 MiB, or is no publisher", key, subscription.address)
                await asyncio.sleep(0)
            await asyncio.sleep(POLL_S)

    def _accept(self, subscription: _Subscription) -> Counts:
        """Queue what has come."""
        feed, counts, accepted, unix_ns = self._feed, Counts(), [], self._clock.unix_nano()
        for number, body in subscription.messages():
            if len(body) > feed.body_bytes_max:
                counts[table.MESSAGES, feed.key, Outcome.TOO_LARGE] += 1
                continue
            is_numbered = len(number) == _SEQUENCE_BYTES
            read = feed.read(subscription.endpoint, number, body, unix_ns) if is_numbered else Skip.UNDECODABLE
            if isinstance(read, Skip):
                counts[table.MESSAGES, feed.key, read] += 1
                continue
            if feed.sequence_of is not None:
                stream, at = feed.sequence_of(read)
                expected = self._expected.get((subscription.address, stream), 0)
                self._expected[subscription.address, stream] = at + 1
                # after a smaller number than expected it is a new start
                missing = at - expected if at >= expected else at
                counts[table.KV_MISSING,] += missing if missing < _GAP_MAX else 0
            accepted.append(read)
        counts[table.MESSAGES, feed.key, table.ACCEPTED] += len(accepted)
        with self._lock:
            self._queue.extend(accepted)
            self._queued += sum(map(feed.size_of, accepted))
            while self._queued > QUEUE_MAX:
                self._queued -= feed.size_of(self._queue.popleft())
                counts[table.MESSAGES, feed.key, table.DROPPED] += 1
        return counts
