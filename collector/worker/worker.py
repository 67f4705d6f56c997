"""The one thread that decodes, joins and learns: no locks in the pipeline, because nobody else touches it.

Several queued exports go into one call, since small ones are much cheaper together; a batch is bounded in bytes, so
that the check-ins and new generations keep coming under load.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from collector.decode.kv import KvBatch
from collector.receive import AdmissionQueue, Batch, Export
from collector.runtime import Clock, Health
from collector.telemetry import Counts, Metrics, Stall, table
from online import RowOutcome, Target

from .publish import Publisher
from .stall import Progress, StallWatch

NAME = "worker"
IDLE_WAIT_S = 0.5
CHECK_IN_TIMEOUT_S = 60.0
"""Longer than the slowest batch (one 32 MiB export); past it the thread hangs and a restart is the cure."""

_log = logging.getLogger(__name__)


class Processor(Protocol):
    """What the worker needs of the pipeline."""

    def process(self, exports: Sequence[Export]) -> None:
        """Decode, join, learn."""
        ...

    def process_kv(self, batches: Sequence[KvBatch]) -> None:
        """Take KV events."""
        ...

    def take_counts(self) -> Counts:
        """What was counted since the last call."""
        ...


class Keeper(Protocol):
    """What the worker needs of :class:`~collector.durable.keeper.Durability`."""

    def backlog(self, bytes_max: int) -> list[Export]:
        """The next exports that an earlier process acknowledged."""
        ...

    def processed(self) -> None:
        """A batch has been processed."""
        ...

    def tick(self, *, final: bool = False) -> None:
        """Take the state if it is due."""
        ...


class _KeepNothing:
    def backlog(self, bytes_max: int) -> list[Export]:  # noqa: ARG002
        return []

    def processed(self) -> None:
        return

    def tick(self, *, final: bool = False) -> None:  # noqa: ARG002
        return


class Worker:
    """Runs until the queue is closed and empty, or until it is told to leave the rest."""

    def __init__(
        self,
        queue: AdmissionQueue[Export],
        processor: Processor,
        publisher: Publisher,
        *,
        health: Health,
        metrics: Metrics,
        clock: Clock,
        batch_bytes: int,
        on_death: Callable[[], None],
        take_kv: Callable[[], Sequence[KvBatch]] = tuple,
        keep: Keeper | None = None,
        watch: StallWatch | None = None,
    ) -> None:
        self._queue = queue
        self._processor = processor
        self._publisher = publisher
        self._health = health
        self._metrics = metrics
        self._clock = clock
        self._batch_bytes = batch_bytes
        self._on_death = on_death
        self._take_kv = take_kv
        self._keep: Keeper = keep or _KeepNothing()
        self._watch = watch
        self._batches_failed = self._spans_understood = self._rows_offered = self._rows_learned = 0
        self._stalled: Stall | None = None
        self._behind = True
        self._abandon = threading.Event()
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self.died = False

    def start(self) -> None:
        """Begin."""
        self._health.register(NAME, CHECK_IN_TIMEOUT_S)
        self._thread.start()

    def finish(self, drain_s: float, last_batch_s: float) -> bool:
        """Wait until the closed queue is drained; after ``drain_s`` leave the rest. True if nothing was left."""
        if self._thread.ident is None:
            return True  # never started
        self._thread.join(drain_s)
        if self._thread.is_alive():
            self._abandon.set()
            self._thread.join(last_batch_s)
        return not self._thread.is_alive() and not self._abandon.is_set() and not self.died

    def _run(self) -> None:
        try:
            while (self._behind or not self._queue.exhausted) and not self._abandon.is_set():
                self.step(IDLE_WAIT_S)
            self._keep.tick(final=True)
            self._publisher.tick(final=True)
            self._health.unregister(NAME)
        except BaseException:  # noqa: BLE001 -- whatever it was, main must hear of it
            self.died = True
            _log.exception("worker died")
            self._on_death()

    def step(self, wait_s: float) -> None:
        """One turn: a batch if there is one, then a state and a generation if they are due."""
        self._health.check_in(NAME)
        if self._behind:  # what an earlier process acknowledged comes before anything new
            backlog = self._keep.backlog(self._batch_bytes)
            self._behind = bool(backlog)
            if backlog:
                self._learn(Batch(tuple(backlog), 0, 0))
        if not self._behind:
            self._take(wait_s)
        self._look()
        self._keep.tick()
        self._publisher.tick()

    def _take(self, wait_s: float) -> None:
        batch = self._queue.take(self._batch_bytes, wait_s)
        self._hear(self._take_kv())
        if batch is not None:
            try:
                self._learn(batch)
            finally:
                self._queue.done(batch.size_bytes)

    def _look(self) -> None:
        stalled = self._watch.stalled() if self._watch is not None else None
        if stalled is self._stalled:
            return
        for reason in Stall:
            self._metrics.set(table.LEARNING_STALLED, reason is stalled, reason)
        if stalled is not None:
            _log.error("spans arrive and nothing is learned: %s", stalled)
        else:
            _log.info("learning goes on")
        self._stalled = stalled

    def _hear(self, batches: Sequence[KvBatch]) -> None:
        if not batches:
            return
        try:
            self._processor.process_kv(batches)
        except Exception:  # noqa: BLE001 -- as in _learn
            _log.exception("KV events failed")
        self._metrics.merge(self._processor.take_counts())

    def _note(self, counts: Counts) -> None:
        if self._watch is None:
            return
        self._spans_understood += int(counts[table.DECODED_SPANS_OK])
        self._rows_offered += int(counts.total(table.ROWS))
        self._rows_learned += int(sum(counts[table.ROWS, target, RowOutcome.LEARNED] for target in Target))
        self._watch.saw(Progress(self._batches_failed, self._spans_understood, self._rows_offered, self._rows_learned))

    def _learn(self, batch: Batch[Export]) -> None:
        start_ns = self._clock.monotonic_ns()
        try:
            self._processor.process(batch.items)
        except Exception:  # noqa: BLE001
            # process() counts bad input and does not raise; this is a fault of ours, and no reason to stop receiving
            self._metrics.add(table.WORKER_FAILED_SPANS, sum(export.spans for export in batch.items))
            self._batches_failed += 1
            _log.exception("batch failed")
        self._keep.processed()
        counts = self._processor.take_counts()
        self._metrics.merge(counts)
        self._note(counts)
        self._metrics.set(table.WORKER_LAG, batch.waited_ns / 1e9)
        self._metrics.observe(table.WORKER_BATCH, (self._clock.monotonic_ns() - start_ns) / 1e9)
