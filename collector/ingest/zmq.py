"""Publishers over ZMQ: KV-cache events of vLLM, ForwardPassMetrics of several engines.

One SUB socket for each endpoint in the loop, a bounded queue for the worker. Connecting never waits: an endpoint that
is not there yet, goes away or never answers costs nothing but its messages. What arrives is decoded at once (token ids
never leave a message), for ``_TURN_S`` at a time. What has not been read waits at the publisher, but for
``SOCKET_BYTES``. PUB drops silently, so a loss shows in the publisher's numbers only, and is counted. A message that is
too large ends its connection, and so does a peer that is no publisher. libzmq tells a monitor only, and does not
connect again: this does, and counts the message. libzmq limits the bytes of a frame, and not the number of frames, so
that one message may take all memory before it has ended: while the process has more than its limit, which exports
alone do not bring about since they are refused before, the sockets are closed and opened anew. pyzmq is an optional
dependency (extra ``kv``), imported when the first subscriber starts.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Generic, NamedTuple, TypeVar

from collector.config import Config, ConfigError, Owned, parse_owned
from collector.decode import fpm, kv
from collector.decode.fpm import ForwardPass
from collector.decode.kv import KvBatch
from collector.runtime import Clock, Health, IoLoop, SteadyClock, begin
from collector.telemetry import Counts, Metrics, Outcome, Skip, table

KV_QUEUE, FPM_QUEUE = 10_000, 50_000
"""Messages that wait for the worker, moves of blocks in them counted in; beyond it the oldest go, counted. With its
first row the worker imports River, which takes seconds on a busy machine: five of 10,000 records, 15 MB, may wait."""
SOCKET_BYTES = 32 << 20
"""What libzmq may hold of one kind, over all connections that were configured."""
FRAMES_MAX = 8
"""Of a message; vLLM's have three or four."""
MEMORY_LOOK_S = 0.02
"""How often it is looked at whether memory is over its limit; a local publisher sends 20 MB meanwhile."""
REOPEN_S = 1.0
"""How long the sockets stay closed then: who fills memory begins anew as soon as it can."""
IDLE_MS = 1_000
"""After so long without a message, an endpoint's connection is looked at."""
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 10_000, 30_000
_RECONNECT_MS, _RECONNECT_MAX_MS = 200, 10_000
_TURN_S = 0.01
HEAP_S = 0.1
"""Between two looks at a socket; with 0, a record costs half as much again."""
NO_PACKAGE = "pyzmq is not installed: install tracefit's extra kv"

T = TypeVar("T")

_log = logging.getLogger(__name__)


def check_zmq(config: Config) -> None:
    """ConfigError where endpoints are configured and pyzmq is not installed; imports nothing, opens nothing."""
    for key in ("kv", "fpm"):
        if getattr(config, key) and find_spec("zmq") is None:
            raise ConfigError(key, NO_PACKAGE)


class Feed(NamedTuple, Generic[T]):
    """One kind of message, by the key of its endpoints, and who reads those of an endpoint: its frames, when it came.

    A message of more than ``message_bytes_max`` ends its connection. ``queue_max`` may wait; ``size_of`` tells how
    many places one takes. ``sequence_of``, where gaps are counted here, tells its stream and its number there.
    """

    key: str
    reader_of: Callable[[Owned], Callable[[Sequence[bytes], int], T | Skip]]
    message_bytes_max: int
    queue_max: int
    size_of: Callable[[T], int] = lambda _: 1
    sequence_of: Callable[[T], tuple[int, int]] | None = None


def _kv_reader_of(endpoint: Owned) -> Callable[[Sequence[bytes], int], KvBatch | Skip]:
    return lambda frames, _unix_ns: kv.read_frames(frames, endpoint.address, endpoint.instance)


def _fpm_reader_of(endpoint: Owned) -> Callable[[Sequence[bytes], int], ForwardPass | Skip]:
    """The wire has no time of day, so that of arrival counts.

    Who publishes on a socket of the file system is SGLang, which times the GPU and does not say so in its records.
    """
    times = "gpu" if endpoint.address.startswith((_GPU, _IPC)) else "host"
    return partial(fpm.read_frames, times=times, instance=endpoint.instance, source=endpoint.address)


KV_FEED = Feed[KvBatch](
    "kv", _kv_reader_of, 2 << 20, KV_QUEUE, lambda batch: 1 + len(batch.moves), lambda batch: (batch.rank, batch.seq)
)
"""Of a step of 131,072 tokens a batch holds 0.7 MB of token ids and 0.3 MB of hashes."""
FPM_FEED = Feed[ForwardPass]("fpm", _fpm_reader_of, 4 << 10, FPM_QUEUE)
_GPU, _IPC = "gpu+", "ipc://"


class _Subscription:
    """The socket of one endpoint, and its numbers by stream; used in the loop."""

    def __init__(self, zmq: Any, context: Any, feed: Feed[Any], endpoint: Owned, high_water: int) -> None:
        self.read = feed.reader_of(endpoint)
        self.is_behind = False
        """Whether more had come than the last turn read, as far as libzmq may hold it."""
        self._zmq, self._context = zmq, context
        self._expected: dict[int, int] = {}
        self._high_water = high_water
        self._feed = feed
        self._address = endpoint.address.removeprefix(_GPU)

    def open(self) -> None:
        """Make the socket and connect or bind it; ConfigError if that cannot be."""
        zmq, feed, address = self._zmq, self._feed, self._address
        self.sub = self._context.socket(zmq.SUB)
        self._socket = zmq.Socket.shadow(self.sub.underlying)
        self._frames: list[bytes] = []
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, self._high_water),
            (zmq.MAXMSGSIZE, feed.message_bytes_max),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
            (zmq.IPV6, 1),
            (zmq.SUBSCRIBE, b""),
        ):
            self.sub.setsockopt(option, value)
        # A publisher whose endpoint has no "*" connects (wire contract §7.1): then the other side binds.
        binds = "*" in address
        self._monitor = self._events = None
        self._is_publisher = self._is_disconnected = False
        if not binds:
            events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
            self._monitor = self.sub.get_monitor_socket(events)
            self._events = zmq.Socket.shadow(self._monitor.underlying)
        try:
            self.sub.bind(address) if binds else self.sub.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(feed.key, f"{address}: {error.strerror}") from None

    def close(self) -> None:
        """End the monitor, so that libzmq tells it nothing more, and close both sockets; of no effect a second time."""
        if self._monitor is not None:
            self.sub.disable_monitor()
            self._monitor.close()
            self._monitor = self._events = None
        self.sub.close()

    def watch(self) -> None:
        """Read what the monitor tells; libzmq waits, with all its sockets, for a monitor that nobody reads."""
        from zmq.utils.monitor import parse_monitor_message  # noqa: PLC0415 -- optional, as pyzmq is

        while self._events is not None:
            try:
                event = parse_monitor_message(self._events.recv_multipart(self._zmq.NOBLOCK))["event"]
            except self._zmq.Again:
                return
            self._is_disconnected = event == self._zmq.EVENT_DISCONNECTED
            if not self._is_disconnected:
                self._is_publisher = event == self._zmq.EVENT_HANDSHAKE_SUCCEEDED

    def connect_again(self) -> bool:
        """Connect where the other side broke the protocol, and say whether it did so by a message that is too large.

        Where the publisher went away, libzmq tries to connect again, and the monitor tells. It has until the next look.
        Whoever connects to a socket of ours connects again by itself, and is not watched.
        """
        was_disconnected = self._is_disconnected
        self.watch()
        if not (was_disconnected and self._is_disconnected):
            return False
        is_too_large, self._is_publisher, self._is_disconnected = self._is_publisher, False, False
        if is_too_large:
            text = "%s: a message of more than %d bytes ended the connection to %s, which is made anew"
            _log.warning(text, self._feed.key, self._feed.message_bytes_max, self._address)
        else:
            _log.warning("%s: no publisher listens at %s", self._feed.key, self._address)
        self.sub.disconnect(self._address)
        self.sub.connect(self._address)
        return is_too_large

    def waiting(self) -> Iterator[list[bytes]]:
        """Messages that have come, for so long at most: to wait for each by itself would cost more than to read it.

        A frame says whether more follow; ``recv_multipart`` asks the socket, which costs a fifth of a record. Of a
        message with more than ``FRAMES_MAX`` frames one more is kept.
        """
        receive, at_once, now_s = self._socket.recv, self._zmq.NOBLOCK, asyncio.get_running_loop().time
        until_s, read = now_s() + _TURN_S, 0
        while now_s() < until_s:
            try:
                frame = receive(at_once, copy=False)
            except self._zmq.Again:
                self.is_behind = read >= self._high_water
                return
            if len(self._frames) <= FRAMES_MAX:
                self._frames.append(frame.bytes)
            if not frame.more:
                frames, self._frames = self._frames, []
                read += 1
                yield frames
        self.is_behind = True

    def count_number(self, stream: int, number: int, counts: Counts) -> None:
        """A message of this number came: those before it that did not are missing; a smaller one is a new start."""
        expected = self._expected.get(stream, 0)
        counts[table.KV_MISSING] += number - expected if number >= expected else number
        self._expected[stream] = number + 1


class Subscriber(Generic[T]):
    """Subscribes to every endpoint of a feed in the loop; the worker takes what came. Without endpoints it is idle.

    Args:
        feed: what the endpoints publish.
        config: names them.
        metrics: where it is counted.
        clock: says when messages came, but never goes back.
        io: the loop.
        health: what is told if a task dies.
        notify: wakes the worker before the queue is full.
        is_short: whether the process has more memory than its limit.
    """

    def __init__(
        self,
        feed: Feed[T],
        config: Config,
        metrics: Metrics,
        clock: Clock,
        io: IoLoop,
        health: Health | None = None,
        notify: Callable[[], None] = lambda: None,
        is_short: Callable[[], bool] = lambda: False,
    ) -> None:
        self._feed = feed
        self._endpoints = [parse_owned(text) for text in getattr(config, feed.key)]
        self._metrics = metrics
        self._clock = SteadyClock(clock)
        self._io = io
        self._health = health
        self._notify = notify
        self._is_short = is_short
        self._lock = threading.Lock()
        """Guards the queue; all else belongs to the loop."""
        self._queue: deque[T] = deque()
        self._queued = 0
        self._subscriptions: list[_Subscription] = []
        self._listening: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None
        self._context: Any = None
        metrics.follow(table.SIZE, lambda: self._queued, feed.key)
        metrics.set(table.CAPACITY, feed.queue_max, feed.key)

    def start(self) -> None:
        """Open the sockets and listen, whether or not anybody is there; ConfigError when that is impossible."""
        if self._endpoints:
            self._io.run(self._start())

    def stop(self) -> bool:
        """Listen no more, and close the sockets. Always True: nobody's message was acknowledged."""
        self._io.run(self._stop())
        return True

    def take(self) -> list[T]:
        """What came since the last call, in order of arrival."""
        with self._lock:
            out = list(self._queue)
            self._queue.clear()
            self._queued = 0
        return out

    async def _start(self) -> None:
        try:
            import zmq  # noqa: PLC0415 -- optional: only who configures endpoints needs it
            import zmq.asyncio  # noqa: PLC0415
        except ImportError:
            raise ConfigError(self._feed.key, NO_PACKAGE) from None
        self._context = zmq.asyncio.Context()
        high_water = max(SOCKET_BYTES // (self._feed.message_bytes_max * len(self._endpoints)), 1)
        try:
            for endpoint in self._endpoints:
                subscription = _Subscription(zmq, self._context, self._feed, endpoint, high_water)
                subscription.open()
                self._subscriptions.append(subscription)
        except ConfigError:
            await self._stop()
            raise
        self._begin_listening()
        self._watching = begin(f"{self._feed.key}-watch", self._watch_memory(), self._health)

    async def _stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await self._close()
        if self._context is not None:
            self._context.term()
            self._context = None

    def _begin_listening(self) -> None:
        name = f"{self._feed.key}-receiver"
        self._listening = [begin(name, self._listen(each), self._health) for each in self._subscriptions]

    async def _close(self) -> None:
        for task in self._listening:
            task.cancel()
        await asyncio.gather(*self._listening, return_exceptions=True)
        for subscription in self._subscriptions:
            subscription.close()

    async def _watch_memory(self) -> None:
        """While memory is over its limit, let go of all that libzmq holds: a loss shows in the publisher's numbers."""
        while True:
            await asyncio.sleep(MEMORY_LOOK_S)
            if not self._is_short():
                continue
            _log.warning("%s: memory is over its limit: all connections are closed for a second", self._feed.key)
            await self._close()
            await asyncio.sleep(REOPEN_S)
            for subscription in self._subscriptions:
                await self._open_again(subscription)
            self._begin_listening()

    async def _open_again(self, subscription: _Subscription) -> None:
        """Until it succeeds: libzmq gives a port that was bound back in a thread of its own."""
        while True:
            try:
                return subscription.open()
            except ConfigError:
                await asyncio.sleep(MEMORY_LOOK_S)

    async def _listen(self, subscription: _Subscription) -> None:
        """Read in turns. Where more has come than one turn reads, the next comes sooner: half of the loop's time."""
        while True:
            if not await subscription.sub.poll(IDLE_MS):
                if subscription.connect_again():
                    self._metrics.add(table.MESSAGES, 1, self._feed.key, Outcome.TOO_LARGE)
                continue
            subscription.watch()
            self._metrics.merge(self._accept(subscription))
            if self._queued > self._feed.queue_max // 4:
                self._notify()
            await asyncio.sleep(_TURN_S if subscription.is_behind else HEAP_S)

    def _accept(self, subscription: _Subscription) -> Counts:
        """Queue what has come."""
        feed, counts, accepted, unix_ns = self._feed, Counts(), [], self._clock.unix_nano()
        for frames in subscription.waiting():
            if len(frames) > FRAMES_MAX:
                counts[table.MESSAGES, feed.key, Outcome.TOO_LARGE] += 1
                continue
            read = subscription.read(frames, unix_ns)
            if isinstance(read, Skip):
                counts[table.MESSAGES, feed.key, read] += 1
                continue
            if feed.sequence_of is not None:
                subscription.count_number(*feed.sequence_of(read), counts)
            accepted.append(read)
        counts[table.MESSAGES, feed.key, table.ACCEPTED] += len(accepted)
        with self._lock:
            self._queue.extend(accepted)
            self._queued += sum(map(feed.size_of, accepted))
            while self._queued > feed.queue_max:
                self._queued -= feed.size_of(self._queue.popleft())
                counts[table.MESSAGES, feed.key, table.DROPPED] += 1
        return counts
