"""KV-cache events from vLLM's ZMQ publishers: one thread, one SUB per endpoint, a bounded queue for the worker.

Connecting never waits: an endpoint that is not there yet, goes away or never answers costs nothing but its events. What
arrives is decoded at once (token ids never leave the message) and waits in a bounded queue for the worker. A publisher
numbers its batches from 0 and starts again with its process (wire contract §7.1); PUB drops silently, so a gap shows in
the numbers only, and is counted. pyzmq is an optional dependency (extra ``kv``), imported when the first subscriber
starts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from collector.config import ConfigError, KvConfig, KvEndpoint
from collector.decode.kv import KvBatch, read_frames
from collector.runtime import Health, Task
from collector.telemetry import Counts, KvSkip, Metrics, SequenceEvent, table

NAME = "kv-receiver"
TURN_TIMEOUT_S = 60.0
"""A turn that reads a thousand of the largest messages takes a while."""
_POLL_MS = 500
_MESSAGES_PER_TURN = 1000
QUEUE_BATCHES = 10_000
"""Batches that wait for the worker; beyond it the oldest go, counted."""
_MESSAGE_BYTES_MAX = 16 * 2**20
"""A larger message closes the connection (libzmq), which comes back by itself."""
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 10_000, 30_000
_RECONNECT_MS, _RECONNECT_MAX_MS = 200, 10_000

NO_PACKAGE = "pyzmq is not installed: install tracefit's extra kv"


class KvUnavailable(Exception):
    """KV endpoints are configured, but pyzmq is not installed or an endpoint cannot be used."""


def check_kv(settings: KvConfig) -> None:
    """ConfigError where endpoints are configured and pyzmq is not installed; imports nothing, opens nothing."""
    if settings.endpoints and find_spec("zmq") is None:
        raise ConfigError("receivers.kv.endpoints", NO_PACKAGE)


class _Subscription:
    """The socket of one endpoint, and its numbers by data-parallel rank; used by the subscriber's thread only."""

    def __init__(self, zmq: Any, context: Any, endpoint: KvEndpoint, high_water: int) -> None:
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
            (zmq.SUBSCRIBE, endpoint.topic.encode()),
        ):
            self.sub.setsockopt(option, value)
        address = endpoint.endpoint
        try:
            # A publisher whose endpoint has no "*" connects (wire contract §7.1): then the other side binds.
            self.sub.bind(address) if "*" in address else self.sub.connect(address)
        except zmq.ZMQError as error:
            self.sub.close()
            raise KvUnavailable(f"{address}: {error.strerror}") from None

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


class KvSubscriber:
    """Subscribes to every endpoint in one thread; the worker takes what came."""

    def __init__(self, settings: KvConfig, health: Health, queue_batches: int = QUEUE_BATCHES) -> None:
        self._counts = Counts()
        self._endpoints = settings.endpoints
        self._queue_batches = queue_batches
        self._lock = threading.Lock()
        """Guards the queue; all else belongs to the task."""
        self._queue: deque[KvBatch] = deque()
        self._task = Task(NAME, self._receive, health=health, turn_timeout_s=TURN_TIMEOUT_S)
        self._subscriptions: list[_Subscription] = []
        self._zmq: Any = None
        self._context: Any = None
        self._poller: Any = None

    @property
    def queued(self) -> int:
        """Batches that wait for the worker."""
        return len(self._queue)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._task.running

    def counts(self) -> Counts:
        """What was counted since the start: received = accepted + Σ skipped; dropped ones were accepted before."""
        return Counts(self._counts)  # copied at once: the thread goes on counting

    def start(self) -> None:
        """Open the sockets and start the thread; returns at once, whether or not anybody is there."""
        try:
            import zmq  # noqa: PLC0415 -- optional: only who configures endpoints needs it
        except ImportError:
            raise KvUnavailable(NO_PACKAGE) from None
        self._zmq = zmq
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        try:
            for endpoint in self._endpoints:
                self._subscriptions.append(_Subscription(zmq, self._context, endpoint, self._queue_batches))
        except KvUnavailable:
            self._close()
            raise
        for subscription in self._subscriptions:
            self._poller.register(subscription.sub, zmq.POLLIN)
        self._task.start()

    def stop(self) -> None:
        """End the task and close the sockets."""
        if self._task.stop() and self._context is not None:
            self._close()

    def _close(self) -> None:
        for subscription in self._subscriptions:
            subscription.sub.close()
        self._context.term()
        self._context = None

    def take(self) -> list[KvBatch]:
        """What came since the last call, in order of arrival."""
        with self._lock:
            out = list(self._queue)
            self._queue.clear()
        return out

    # --- the task ---------------------------------------------------------------------------------------------------

    def _receive(self) -> float:
        ready = dict(self._poller.poll(_POLL_MS))
        for subscription in self._subscriptions:
            if subscription.sub in ready:
                self._read(subscription)
        return 0.0

    def _read(self, subscription: _Subscription) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            try:
                frames = subscription.sub.recv_multipart(flags=self._zmq.NOBLOCK)
            except self._zmq.ZMQError:
                return
            batch = read_frames(frames, subscription.endpoint.endpoint)
            self._counts[table.KV_RECEIVED_MESSAGES] += 1
            if isinstance(batch, KvSkip):
                self._counts[table.KV_RECEIVED_SKIPPED, batch] += 1
                continue
            subscription.count_number(batch.rank, batch.seq, self._counts)
            self._accept(batch.of(subscription.endpoint.instance))

    def _accept(self, batch: KvBatch) -> None:
        self._counts[table.KV_RECEIVED_OK] += 1
        with self._lock:
            self._queue.append(batch)
            if len(self._queue) > self._queue_batches:
                self._queue.popleft()
                self._counts[table.KV_DROPPED_MESSAGES] += 1


class KvIntake:
    """The subscriber, if endpoints are configured; without them nothing is opened and pyzmq is not needed."""

    def __init__(self, settings: KvConfig, metrics: Metrics, health: Health) -> None:
        self._metrics = metrics
        self._subscriber = KvSubscriber(settings, health) if settings.endpoints else None
        self._exported = Counts()
        metrics.follow(table.KV_QUEUE, lambda: self._subscriber.queued if self._subscriber is not None else 0)

    def start(self) -> None:
        """Begin to listen; raises ConfigError when that is impossible, never waits for a publisher."""
        if self._subscriber is None:
            return
        try:
            self._subscriber.start()
        except KvUnavailable as error:
            raise ConfigError("receivers.kv.endpoints", str(error)) from None

    def stop(self) -> bool:
        """Stop listening and join the thread."""
        if self._subscriber is not None:
            self._subscriber.stop()
        return True

    def take(self) -> Sequence[KvBatch]:
        """What came since the last call."""
        if self._subscriber is None:
            return ()
        batches = self._subscriber.take()
        counts = self._subscriber.counts()
        self._metrics.merge(Counts({row: number - self._exported[row] for row, number in counts.items()}))
        self._exported = counts
        return batches
