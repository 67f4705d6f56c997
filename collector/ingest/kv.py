"""KV-cache events from vLLM's ZMQ publishers: one SUB per endpoint in the loop, a bounded queue for the worker.

Connecting never waits: an endpoint that is not there yet, goes away or never answers costs nothing but its events. What
arrives is decoded at once (token ids never leave the message) and waits in a bounded queue for the worker. A publisher
numbers its batches from 0 and starts again with its process (wire contract §7.1); PUB drops silently, so a gap shows in
the numbers only, and is counted. pyzmq is an optional dependency (extra ``kv``), imported when the first subscriber
starts.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from importlib.util import find_spec
from typing import Any

from collector.config import Config, ConfigError, Owned, parse_owned
from collector.decode.kv import KvBatch, read_frames
from collector.runtime import Health, IoLoop, begin
from collector.telemetry import Counts, KvSkip, Metrics, SequenceEvent, table

NAME = "kv-receiver"
"""In health."""
QUEUE_BATCHES = 10_000
"""Batches that wait for the worker; beyond it the oldest go, counted."""
_MESSAGE_BYTES_MAX = 16 * 2**20
"""A larger message closes the connection (libzmq), which comes back by itself."""
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 10_000, 30_000
_RECONNECT_MS, _RECONNECT_MAX_MS = 200, 10_000

NO_PACKAGE = "pyzmq is not installed: install tracefit's extra kv"


def check_kv(settings: Config) -> None:
    """ConfigError where endpoints are configured and pyzmq is not installed; imports nothing, opens nothing."""
    if settings.kv and find_spec("zmq") is None:
        raise ConfigError("kv", NO_PACKAGE)


class _Subscription:
    """The socket of one endpoint, and its numbers by data-parallel rank; used in the loop."""

    def __init__(self, zmq: Any, context: Any, endpoint: Owned, high_water: int) -> None:
        self.endpoint = endpoint
        self.sub = context.socket(zmq.SUB)
        self._expected: dict[int, int] = {}
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, high_water),
            (zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
            (zmq.IPV6, 1),
            (zmq.SUBSCRIBE, b""),
        ):
            self.sub.setsockopt(option, value)
        address = endpoint.address
        try:
            # A publisher whose endpoint has no "*" connects (wire contract §7.1): then the other side binds.
            self.sub.bind(address) if "*" in address else self.sub.connect(address)
        except zmq.ZMQError as error:
            self.sub.close()
            raise ConfigError("kv", f"{address}: {error.strerror}") from None

    def count_number(self, rank: int, seq: int, counts: Counts) -> None:
        """A batch of this number came: gaps, and starts over, are counted."""
        expected = self._expected.get(rank, 0)
        if seq < expected:
            counts[table.KV_SEQUENCE, SequenceEvent.RESTARTS] += 1
            expected = 0
        if seq > expected:
            counts[table.KV_SEQUENCE, SequenceEvent.GAPS] += 1
            counts[table.KV_SEQUENCE, SequenceEvent.MISSING] += seq - expected
        self._expected[rank] = seq + 1


class KvReceiver:
    """Listens to every endpoint in the loop; the worker takes what came. Without endpoints nothing is opened.

    Counted: received = accepted + Σ skipped; dropped ones were accepted before.
    """

    def __init__(
        self,
        settings: Config,
        metrics: Metrics,
        io: IoLoop | None = None,
        health: Health | None = None,
        queue_batches: int = QUEUE_BATCHES,
    ) -> None:
        self._endpoints = [parse_owned(text) for text in settings.kv]
        self._metrics = metrics
        self._queue_batches = queue_batches
        self._io = io or IoLoop()
        self._own_io = io is None
        self._health = health
        self._lock = threading.Lock()
        """Guards the queue; all else belongs to the loop."""
        self._queue: deque[KvBatch] = deque()
        self._subscriptions: list[_Subscription] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._context: Any = None
        metrics.follow(table.KV_QUEUE, lambda: len(self._queue))

    def start(self) -> None:
        """Open the sockets and listen, whether or not anybody is there; ConfigError when that is impossible."""
        if self._endpoints:
            self._io.run(self._start())

    def stop(self) -> bool:
        """Listen no more, and close the sockets. Always True: nobody's batch was acknowledged."""
        self._io.run(self._stop())
        if self._own_io:
            self._io.close()
        return True

    def take(self) -> list[KvBatch]:
        """What came since the last call, in order of arrival."""
        with self._lock:
            out = list(self._queue)
            self._queue.clear()
        return out

    async def _start(self) -> None:
        try:
            import zmq  # noqa: PLC0415 -- optional: only who configures endpoints needs it
            import zmq.asyncio  # noqa: PLC0415
        except ImportError:
            raise ConfigError("kv", NO_PACKAGE) from None
        self._context = zmq.asyncio.Context()
        try:
            for endpoint in self._endpoints:
                self._subscriptions.append(_Subscription(zmq, self._context, endpoint, self._queue_batches))
        except ConfigError:
            await self._stop()
            raise
        self._tasks = [begin(NAME, self._listen(each), self._health) for each in self._subscriptions]

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for subscription in self._subscriptions:
            subscription.sub.close()
        if self._context is not None:
            self._context.term()
            self._context = None

    async def _listen(self, subscription: _Subscription) -> None:
        while True:
            frames = await subscription.sub.recv_multipart()
            counts = Counts()
            self._accept(read_frames(frames, subscription.endpoint.address), subscription, counts)
            self._metrics.merge(counts)

    def _accept(self, batch: KvBatch | KvSkip, subscription: _Subscription, counts: Counts) -> None:
        counts[table.KV_RECEIVED_MESSAGES] += 1
        if isinstance(batch, KvSkip):
            counts[table.KV_RECEIVED_SKIPPED, batch] += 1
            return
        subscription.count_number(batch.rank, batch.seq, counts)
        counts[table.KV_RECEIVED_OK] += 1
        with self._lock:
            self._queue.append(batch.of(subscription.endpoint.instance))
            dropped = len(self._queue) > self._queue_batches
            if dropped:
                self._queue.popleft()
        counts[table.KV_DROPPED_MESSAGES] += dropped
