"""The queue and the thread behind the tap: rows become OTLP requests, four times a second.

The engine's thread only appends to a deque, which the interpreter makes atomic; there is no lock and no wake-up to pay
for. The exporter's thread starts, and grpc is imported, with the first item, hence after vLLM's own forks and never in
a process without a scheduler. What cannot be sent is retried, then dropped; each dropped item is counted by reason, and
the counts travel in the stream itself, as attributes of the next span.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from .items import Item
from .log import LOG
from .sender import Sender
from .settings import Settings
from .wire import Value

if TYPE_CHECKING:
    from .encode import Encoder

CHUNK_ITEMS: Final = 256
STOP_S: Final = 1.0
"""How long a stopping engine waits for the last events."""
_NEVER_CLOSED: Final[list[Sender | None]] = []
"""In a forked child: senders of its parent, kept so that nothing closes them."""


class Sink(Protocol):
    """Where the tap puts things."""

    def offer(self, item: Item) -> None:
        """Take an item or drop it, at once."""

    def count(self, reason: str) -> None:
        """Count a loss that is to be reported."""

    def stop(self, wait_s: float = STOP_S) -> None:
        """Send what is left; wait no longer than this for it."""


class Exporter:
    """One scheduler's exporter.

    Args:
        settings: endpoint, bounds and interval.
        resource: the resource attributes of everything it sends.
        make_sender: makes the connection, in the exporter's thread.
    """

    def __init__(
        self,
        settings: Settings,
        resource: Mapping[str, Value],
        make_sender: Callable[[Settings], Sender] = Sender,
    ) -> None:
        self._settings = settings
        self._resource = resource
        self._make_sender = make_sender
        # Full: the oldest item leaves. A learner gains more from what is new, and the rest stays consecutive.
        self._queue: deque[Item] = deque(maxlen=settings.queue_items)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._sender: Sender | None = None
        self._drops: Counter[str] = Counter()
        # A forked child has the queue but not the thread: it must not send the parent's events.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _renew(this()))

    def offer(self, item: Item) -> None:
        """Queue an item; when full the oldest is dropped and counted. The first item starts the thread."""
        if len(self._queue) == self._queue.maxlen:
            self._drops["queue_full"] += 1
        self._queue.append(item)
        if self._thread is None and not self._stop.is_set():
            self._thread = threading.Thread(target=self._run, name="tracefit-export", daemon=True)
            self._thread.start()

    def count(self, reason: str) -> None:
        """Count an event of this kind; reported with the next span."""
        self._drops[reason] += 1

    def drops(self) -> dict[str, int]:
        """Return the counts so far, by reason."""
        return dict(self._drops)

    def stop(self, wait_s: float = STOP_S) -> None:
        """Let the thread send what is queued and end; wait no longer than this. May be called again."""
        self._stop.set()
        thread = self._thread
        if thread is None or thread is threading.current_thread() or not wait_s:
            return
        thread.join(wait_s)
        if thread.is_alive() and self._sender is not None:
            self._sender.close()  # cancels the call that hangs

    def forget(self) -> None:
        """Start anew after a fork: nothing queued, no thread, an identity of its own.

        Where the parent has already sent, the child stays silent: gRPC's threads do not survive a fork, and what it
        left of them crashes a child that connects or closes (grpc/grpc, doc/fork_support.md). vLLM forks its engine
        cores before their first step.
        """
        connected = self._thread is not None
        self._queue = deque(maxlen=0 if connected else self._settings.queue_items)
        self._stop = threading.Event()
        if connected:
            self._stop.set()
            _NEVER_CLOSED.append(self._sender)
            self._sender = None
        self._thread = None
        self._drops = Counter()
        self._resource = {
            **self._resource,
            "process.pid": os.getpid(),
            "service.instance.id": str(uuid.uuid4()),
        }

    def _run(self) -> None:
        try:
            from .encode import Encoder  # noqa: PLC0415 protobuf is imported in this thread, not in the engine's

            self._sender = sender = self._make_sender(self._settings)
            encoder = Encoder(self._resource, self._settings.step_sample)
            while not self._stop.wait(self._settings.interval_s):
                self._flush(encoder, sender, patient=True)
            self._flush(encoder, sender, patient=False)
            sender.close()
        except Exception:  # noqa: BLE001 the thread is ours alone; the queue fills up, is bounded, and serving goes on
            LOG.warning("tracefit: the exporter stopped", exc_info=True)

    def _flush(self, encoder: Encoder, sender: Sender, patient: bool) -> None:
        deadline = time.monotonic() + STOP_S
        while self._queue:
            items = [self._queue.popleft() for _ in range(min(len(self._queue), CHUNK_ITEMS))]
            sent = sender.send(encoder.request(items, self._drops), self._stop if patient else None)
            if not sent:
                self._drops["export_failed"] += len(items)
            if not patient and (not sent or time.monotonic() > deadline):
                break


def _renew(exporter: Exporter | None) -> None:
    if exporter is not None:
        exporter.forget()
