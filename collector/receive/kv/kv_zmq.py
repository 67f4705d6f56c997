"""KV-cache events from vLLM's ZMQ publishers: one thread, one SUB per endpoint, a DEALER for replay where configured.

Connecting never waits: an endpoint that is not there yet, goes away or never answers costs nothing but its events. What
arrives is decoded at once (token ids never leave the message) and waits in a bounded queue for the worker. A replay has
time: it is read while the queue is less than half full, and the rest is for what is live. pyzmq is an optional
dependency (extra ``kv``), imported when the first subscriber starts.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from collector.config import KvConfig, KvEndpoint
from collector.decode.kv import KvBatch, read_frames
from collector.runtime import Clock, Health, Task
from collector.telemetry import Counts, KvSkip, table

from .kv_sequence import EndpointSequence

NAME = "kv-receiver"
TURN_TIMEOUT_S = 60.0
"""A turn that reads a thousand of the largest messages takes a while."""
_POLL_MS = 500
_MESSAGES_PER_TURN = 1000
_NO_ROOM_PAUSE_S = 0.02
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 10_000, 30_000
_RECONNECT_MS, _RECONNECT_MAX_MS = 200, 10_000

NO_PACKAGE = "pyzmq is not installed: install tracefit's extra kv"


class KvUnavailable(Exception):
    """KV endpoints are configured, but pyzmq is not installed or an endpoint cannot be used."""


class _Subscription:
    """The sockets of one endpoint; used by the subscriber's thread only."""

    def __init__(self, zmq: Any, context: Any, endpoint: KvEndpoint, settings: KvConfig) -> None:
        self.sequence = EndpointSequence(bool(endpoint.replay), settings.replay_timeout_s, settings.replay_pause_max_s)
        self.name = endpoint.endpoint
        self._zmq, self._context, self._replay = zmq, context, endpoint.replay
        self._bytes_max = settings.message_bytes_max
        self.sub = self._open(zmq.SUB, endpoint.endpoint, settings.queue_batches)
        self.sub.setsockopt(zmq.SUBSCRIBE, endpoint.topic.encode())
        self.dealer: Any = None

    def _open(self, kind: int, address: str, high_water: int) -> Any:
        zmq = self._zmq
        socket = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, high_water),
            (zmq.MAXMSGSIZE, self._bytes_max),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
            (zmq.IPV6, 1),
        ):
            socket.setsockopt(option, value)
        try:
            # A publisher whose endpoint has no "*" connects (wire contract §7.1): then the other side binds.
            socket.bind(address) if "*" in address else socket.connect(address)
        except zmq.ZMQError as error:
            socket.close()
            raise KvUnavailable(f"{address}: {error.strerror}") from None
        return socket

    def ask(self, seq: int, poller: Any) -> None:
        """Ask for everything from ``seq`` on; a request that cannot be sent now will be overdue."""
        self.hang_up(poller)
        self.dealer = self._open(self._zmq.DEALER, self._replay, 0)
        poller.register(self.dealer, self._zmq.POLLIN)
        self.dealer.send_multipart([b"", seq.to_bytes(8, "big")], flags=self._zmq.NOBLOCK)

    def hang_up(self, poller: Any) -> None:
        """Forget the replay connection, and with it a request nobody took."""
        if self.dealer is not None:
            poller.unregister(self.dealer)
            self.dealer.close()
            self.dealer = None

    def close(self) -> None:
        """Close what is open."""
        for socket in (self.sub, self.dealer):
            if socket is not None:
                socket.close()


class KvSubscriber:
    """Subscribes to every endpoint in one thread; the worker takes what came."""

    def __init__(self, settings: KvConfig, clock: Clock, health: Health) -> None:
        self._counts = Counts()
        self._settings = settings
        self._clock = clock
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
        counts = Counts(self._counts)
        for subscription in self._subscriptions:
            counts.merge(Counts(subscription.sequence.counts))  # copied at once: its thread goes on counting
        return counts

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
            for endpoint in self._settings.endpoints:
                self._subscriptions.append(_Subscription(zmq, self._context, endpoint, self._settings))
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
            subscription.close()
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
                self._read(subscription, subscription.sub, live=True)
            if subscription.dealer is not None and subscription.dealer in ready:
                self._read(subscription, subscription.dealer, live=False)
            self._attend(subscription)
        # a replay that waits is ready all the time
        return 0.0 if self._has_room() else _NO_ROOM_PAUSE_S

    def _has_room(self) -> bool:
        """For replays."""
        return 2 * self.queued < self._settings.queue_batches

    def _attend(self, subscription: _Subscription) -> None:
        """Ask again for what is missing, or give up on an answer."""
        now_s = self._now_s()
        if subscription.sequence.overdue(now_s):
            subscription.hang_up(self._poller)
        seq = subscription.sequence.request(now_s)
        if seq is not None:
            try:
                subscription.ask(seq, self._poller)
            except (self._zmq.ZMQError, KvUnavailable):
                return  # overdue in a while, then asked again

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / 1e9

    def _read(self, subscription: _Subscription, socket: Any, *, live: bool) -> None:
        sequence = subscription.sequence
        for _ in range(_MESSAGES_PER_TURN):
            if not live and not self._has_room():
                sequence.answered(self._now_s())
                return
            try:
                frames = socket.recv_multipart(flags=self._zmq.NOBLOCK)
            except self._zmq.ZMQError:
                return
            batch = read_frames(frames, subscription.name)
            if batch is None and not live:  # the end of a replay carries nothing
                sequence.finished()
                subscription.hang_up(self._poller)
                return
            self._counts[table.KV_RECEIVED_MESSAGES] += 1
            if batch is None:
                self._counts[table.KV_RECEIVED_SKIPPED, KvSkip.FRAMES] += 1
            elif isinstance(batch, KvSkip):
                self._counts[table.KV_RECEIVED_SKIPPED, batch] += 1
            elif live:
                sequence.live(batch.rank, batch.seq)
                self._accept(batch)
            else:
                sequence.answered(self._now_s())
                if sequence.replayed(batch.rank, batch.seq):
                    self._accept(batch)
                else:
                    self._counts[table.KV_RECEIVED_SKIPPED, KvSkip.DUPLICATE] += 1

    def _accept(self, batch: KvBatch) -> None:
        self._counts[table.KV_RECEIVED_OK] += 1
        with self._lock:
            self._queue.append(batch)
            if len(self._queue) > self._settings.queue_batches:
                self._queue.popleft()
                self._counts[table.KV_DROPPED_MESSAGES] += 1
