"""The one thread that decodes, joins and learns: no locks in the pipeline, because nobody else touches it.

    an iteration:  a batch ─► learn ─► watches ─► checkpoint, if one is due ─► generation, if one is due

Several queued exports go into one batch, since small ones are much cheaper together. It is bounded in bytes, so that
the check-ins and new generations keep coming under load.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from collector.decode import Export
from collector.runtime import Health, Task
from collector.telemetry import Metrics, table

from .durability import Durability
from .pipeline import TAKE_BYTES, Pipeline
from .publish import Publisher

if TYPE_CHECKING:
    from collector.ingest import ExportQueue

NAME = "worker"
IDLE_WAIT_S = 1.0
"""Without an export: pages, passes, KV events, idle sources, and whatever else is due wait no longer, although they
wake nobody. To look costs 0.3 ms."""
ITERATION_TIMEOUT_S = 60.0
"""Longer than the slowest batch (one 32 MiB export); past it the thread hangs and a restart is the cure."""
LAST_BATCH_S = 7.0
"""Time after the drain for the batch under way, a last checkpoint and a last generation."""

_log = logging.getLogger(__name__)


class Worker:
    """The worker thread; it ends when the queue is closed and empty, or its time to drain is up.

    Args:
        queue: closed and drained by ``stop``.
        pipeline: this thread alone touches it.
        publisher, durability: asked after an iteration whether a generation, or a checkpoint, is due.
        take_others: what came beside exports since the last call, by the names of the pipeline's arguments.
        watches: called after an iteration, in their order.
        drain_s: how long ``stop`` lets it drain the queue and save; then ``LAST_BATCH_S``.
        on_death: called when the thread ends by an error.
    """

    def __init__(
        self,
        queue: ExportQueue,
        pipeline: Pipeline,
        publisher: Publisher,
        durability: Durability,
        *,
        take_others: Mapping[str, Callable[[], Sequence[Any]]] = MappingProxyType({}),
        watches: Sequence[Callable[[], None]] = (),
        drain_s: float,
        health: Health,
        metrics: Metrics,
        on_death: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._pipeline = pipeline
        self._publisher = publisher
        self._durability = durability
        self._take_others = take_others
        self._watches = watches
        self._drain_s = drain_s
        self._metrics = metrics
        self._behind = True
        self._abandoned = False
        self._spans_in_hand = 0
        """Of the batch that is being learned from."""
        self._task = Task(NAME, self._iterate, health=health, timeout_s=ITERATION_TIMEOUT_S, on_death=on_death)

    def start(self) -> None:
        """Start the thread."""
        self._task.start()

    def stop(self) -> bool:
        """Close the queue and drain it, as far as the time allows; False if something acknowledged is not learned."""
        self._queue.close()
        ended = self._task.join(self._drain_s)
        if not ended:
            self._abandoned = True
            ended = self._task.join(LAST_BATCH_S)
        rest = self._queue.take(sys.maxsize, 0.0)
        if ended and rest is None and not self._task.died and not (self._abandoned and self._behind):
            return True
        if self._durability.has_log and not self._task.died:
            _log.warning("stopped before the queue was drained: the rest is in the log")
            return True
        spans = self._spans_in_hand + sum(export.spans for export in (rest.items if rest is not None else ()))
        without = "" if ended else ", no last checkpoint and generation"
        _log.error("stopped before all was done: %d spans not learned from%s", spans, without)
        return False

    def _iterate(self) -> float | None:
        if self._abandoned or (self._queue.exhausted and not self._behind):
            self._end()
            return None
        self.step(IDLE_WAIT_S)
        return 0.0

    def step(self, wait_s: float) -> None:
        """A batch if there is one, then a state and a generation if they are due."""
        if self._behind:  # what an earlier process acknowledged comes before anything new
            read_unlearned = self._durability.read_unlearned(TAKE_BYTES)
            self._behind = bool(read_unlearned)
            if read_unlearned:
                self._learn(read_unlearned, {})
        if not self._behind:
            self._learn_from_queue(wait_s)
        self._metrics.merge(self._pipeline.take_counts())
        for watch in self._watches:
            watch()
        self._durability.tick()
        self._publisher.tick()

    def _end(self) -> None:
        """The last checkpoint and the last generation, in which everything that waits has become rows.

        With a log the checkpoint comes first: a start reads again what waits, and joins it with what comes then.
        """
        if self._durability.has_log:
            self._durability.tick(final=True)
        try:
            self._pipeline.flush()
        except Exception:  # noqa: BLE001 -- as in _learn
            _log.exception("what waits could not be learned")
        self._durability.record_batch()
        self._metrics.merge(self._pipeline.take_counts())
        if not self._durability.has_log:
            self._durability.tick(final=True)
        self._publisher.tick(final=True)

    def _learn_from_queue(self, wait_s: float) -> None:
        batch = self._queue.take(TAKE_BYTES, wait_s)
        others = {name: take() for name, take in self._take_others.items()}
        try:
            if batch is not None or any(others.values()):
                self._learn(batch.items if batch is not None else (), others)
        finally:
            if batch is not None:
                self._queue.done(batch)
        waited_ns = batch.waited_ns if batch is not None else self._queue.queue_age_ns()
        self._metrics.set(table.WORKER_LAG, waited_ns / 1e9)

    def _learn(self, exports: Sequence[Export], others: Mapping[str, Sequence[Any]]) -> None:
        spans = self._spans_in_hand = sum(export.spans for export in exports)
        try:
            self._pipeline.process(exports, **others)
        except Exception:  # noqa: BLE001
            # process() counts bad input and does not raise; this is a fault of ours, and no reason to stop receiving
            self._metrics.add(table.WORKER_FAILED_SPANS, spans)
            _log.exception("batch failed")
        self._spans_in_hand = 0
        self._durability.record_batch()
