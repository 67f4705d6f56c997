"""The queue between the engine's thread and the one that sends.

The engine's thread only appends to a deque, which the interpreter makes atomic; there is no lock and no wake-up to pay
for. The other thread starts with the first step, hence after vLLM's own forks and never in a process without a
scheduler. What does not get through is dropped and counted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from .settings import LOG

if TYPE_CHECKING:
    from .fpm import ForwardPasses
    from .otlp import Spans

    Wire: TypeAlias = ForwardPasses | Spans

QUEUE_STEPS: Final = 20_000
"""A minute of 300 steps a second; a step is below 1 kB."""
CHUNK_STEPS: Final = 256
INTERVAL_S: Final = 0.1
STOP_S: Final = 1.0
"""How long a stopping engine waits for the last steps."""


class Step(NamedTuple):
    """A step that has ended: its number, its times by CLOCK_MONOTONIC, and what its wire read off the batch."""

    number: int
    start_ns: int
    end_ns: int
    output_ns: int
    done_ns: int
    batch: tuple[int, ...]
    since_ns: int = 0  # when the engine was free for it: the step before it was done, told or not, or it was asked


class Publisher:
    """One scheduler's queue, and the thread that gives what is in it to the wire."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        # Full: the oldest step leaves. A learner gains more from what is new, and the rest stays consecutive.
        self._queue: deque[Step] = deque(maxlen=QUEUE_STEPS)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost = 0
        """Steps and hooks that did not get through."""

    def enqueue(self, step: Step) -> None:
        """Queue a step; when full the oldest is dropped and counted. The first one starts the thread."""
        if self._stopping.is_set():
            return
        if len(self._queue) == QUEUE_STEPS:
            self.lost += 1
        self._queue.append(step)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tracefit", daemon=True)
            self._thread.start()

    def stop(self, wait_s: float = STOP_S) -> None:
        """Let the thread send what is queued and end; wait no longer than this. May be called again."""
        self._stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(wait_s)

    def _run(self) -> None:
        try:
            self._wire.open()
            while not self._stopping.wait(INTERVAL_S):
                self._flush()
            self._flush()
            self._wire.close()
        except Exception as error:  # noqa: BLE001 the thread is ours alone, and serving goes on
            LOG.warning("tracefit: off, nothing is sent: %s", error, exc_info=not isinstance(error, OSError))
            self._stopping.set()
            self._queue.clear()

    def _flush(self) -> None:
        began = time.monotonic()
        while True:
            steps = [self._queue.popleft() for _ in range(min(len(self._queue), CHUNK_STEPS))]
            sent = self._wire.send(steps, self.lost)
            if not sent:
                self.lost += len(steps)
            late = self._stopping.is_set() and (not sent or time.monotonic() > began + STOP_S)
            if late or not self._queue:
                return
