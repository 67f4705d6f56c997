"""KV-cache events from vLLM's ZMQ publishers: one thread, one SUB per endpoint, a DEALER for replay where configured.

Connecting never waits: an endpoint that is not there yet, goes away or never answers costs nothing but its events. What
arrives is decoded at once (token ids never leave the message) and waits in a bounded queue for the worker. pyzmq is an
optional dependency (extra ``kv``), imported when the first subscriber starts.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from collector.config import KvConfig, KvEndpoint
from collector.decode.kv import KvBatch, read_frames
from collector.telemetry import KvSkip, SequenceCounts

from .kv_sequence import EndpointSequence

_POLL_MS = 500
_MESSAGES_PER_TURN = 1000
_CONTROL = "inproc://tracefit-kv-stop"
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 10_000, 30_000
_RECONNECT_MS, _RECONNECT_MAX_MS = 200, 10_000


class KvUnavailable(Exception):
    """KV endpoints are configured, but pyzmq is not installed or an endpoint cannot be used."""


@dataclass(slots=True)
class KvCounts:
    """received = accepted + Σ skipped; ``dropped`` of the accepted ones left the full queue unread."""

    received: int = 0
    accepted: int = 0
    skipped: Counter[KvSkip] = field(default_factory=Counter)
    dropped: int = 0


class _Subscription:
    """The sockets of one endpoint; used by the subscriber's thread only."""

    def __init__(self, zmq: Any, context: Any, one: KvEndpoint, settings: KvConfig) -> None:
        self.sequence = EndpointSequence(bool(one.replay), settings.replay_timeout_s, settings.replay_pause_max_s)
        self.name = one.endpoint
        self._zmq, self._context, self._replay = zmq, context, one.replay
        self._bytes_max = settings.message_bytes_max
        self.sub = self._open(zmq.SUB, one.endpoint, settings.queue_batches)
        self.sub.setsockopt(zmq.SUBSCRIBE, one.topic.encode())
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

    def __init__(
        self,
        settings: KvConfig,
        monotonic_s: Callable[[], float],
        wake: Callable[[], None] = lambda: None,
        check_in: Callable[[], None] = lambda: None,
    ) -> None:
        self.counts = KvCounts()
        self._settings = settings
        self._monotonic_s = monotonic_s
        self._wake = wake
        self._check_in = check_in
        self._queue: deque[KvBatch] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._subscriptions: list[_Subscription] = []
        self._zmq: Any = None
        self._context: Any = None
        self._stop_sender: Any = None

    @property
    def queued(self) -> int:
        """Batches that wait for the worker."""
        return len(self._queue)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def sequences(self) -> dict[str, SequenceCounts]:
        """Gaps, replays and restarts by endpoint."""
        return {one.name: one.sequence.counts for one in self._subscriptions}

    def start(self) -> None:
        """Open the sockets and start the thread; returns at once, whether or not anybody is there."""
        try:
            import zmq  # noqa: PLC0415 -- optional: only who configures endpoints needs it
        except ImportError:
            raise KvUnavailable("pyzmq is not installed: pip install 'tracefit[kv]'") from None
        self._zmq = zmq
        self._context = zmq.Context()
        try:
            for one in self._settings.endpoints:
                self._subscriptions.append(_Subscription(zmq, self._context, one, self._settings))
        except KvUnavailable:
            self._close()
            self._context.term()
            raise
        control = self._context.socket(zmq.PAIR)
        control.bind(_CONTROL)
        self._stop_sender = self._context.socket(zmq.PAIR)
        self._stop_sender.setsockopt(zmq.LINGER, 0)
        self._stop_sender.connect(_CONTROL)
        self._thread = threading.Thread(target=self._run, args=(control,), name="tracefit-kv", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop the thread and close the sockets."""
        if self._thread is None:
            return
        self._stop_sender.send(b"", flags=self._zmq.NOBLOCK)
        self._thread.join(timeout_s)
        self._stop_sender.close()
        if not self._thread.is_alive():
            self._context.term()
        self._thread = None

    def take(self) -> list[KvBatch]:
        """What came since the last call, in order of arrival."""
        with self._lock:
            out = list(self._queue)
            self._queue.clear()
        return out

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self, control: Any) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(control, zmq.POLLIN)
        for one in self._subscriptions:
            poller.register(one.sub, zmq.POLLIN)
        try:
            while True:
                self._check_in()
                ready = dict(poller.poll(_POLL_MS))
                if control in ready:
                    return
                before = len(self._queue)
                for one in self._subscriptions:
                    if one.sub in ready:
                        self._read(one, one.sub, poller, live=True)
                    if one.dealer is not None and one.dealer in ready:
                        self._read(one, one.dealer, poller, live=False)
                    self._attend(one, poller)
                if len(self._queue) > before:
                    self._wake()
        finally:
            control.close()
            self._close()

    def _close(self) -> None:
        for one in self._subscriptions:
            one.close()

    def _attend(self, one: _Subscription, poller: Any) -> None:
        """Ask again for what is missing, or give up on an answer."""
        now_s = self._monotonic_s()
        if one.sequence.overdue(now_s):
            one.hang_up(poller)
        seq = one.sequence.request(now_s)
        if seq is not None:
            try:
                one.ask(seq, poller)
            except (self._zmq.ZMQError, KvUnavailable):
                return  # overdue in a while, then asked again

    def _read(self, one: _Subscription, socket: Any, poller: Any, *, live: bool) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            try:
                frames = socket.recv_multipart(flags=self._zmq.NOBLOCK)
            except self._zmq.ZMQError:
                return
            self.counts.received += 1
            batch = read_frames(frames, one.name)
            if batch is None and not live:
                self.counts.received -= 1  # the end of a replay carries nothing
                one.sequence.finished()
                one.hang_up(poller)
                return
            if batch is None:
                self.counts.skipped[KvSkip.FRAMES] += 1
            elif isinstance(batch, KvSkip):
                self.counts.skipped[batch] += 1
            elif live:
                one.sequence.live(batch.rank, batch.seq)
                self._accept(batch)
            else:
                one.sequence.answered(self._monotonic_s())
                if one.sequence.replayed(batch.rank, batch.seq):
                    self._accept(batch)
                else:
                    self.counts.skipped[KvSkip.DUPLICATE] += 1

    def _accept(self, batch: KvBatch) -> None:
        self.counts.accepted += 1
        with self._lock:
            self._queue.append(batch)
            if len(self._queue) > self._settings.queue_batches:
                self._queue.popleft()
                self.counts.dropped += 1
