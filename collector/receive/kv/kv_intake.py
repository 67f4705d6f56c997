"""KV events between their receiver and the worker: taken in batches, every count of the receiver in the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from collector.config import ConfigError, KvConfig
from collector.decode.kv import KvBatch
from collector.runtime import Clock, Health
from collector.telemetry import KvSkip, Metrics, SequenceCounts, table

from .kv_zmq import KvSubscriber, KvUnavailable


class KvIntake:
    """The subscriber, if endpoints are configured; without them nothing is opened and pyzmq is not needed."""

    def __init__(self, settings: KvConfig, metrics: Metrics, clock: Clock, health: Health) -> None:
        self._metrics = metrics
        self._subscriber = KvSubscriber(settings, clock, health) if settings.endpoints else None
        self._exported: dict[tuple[str, str], int] = {}
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
        """Stop listening."""
        if self._subscriber is not None:
            self._subscriber.stop()
        return True

    def take(self) -> Sequence[KvBatch]:
        """What came since the last call."""
        if self._subscriber is None:
            return ()
        batches = self._subscriber.take()
        self._export_counts(self._subscriber)
        return batches

    def _export_counts(self, subscriber: KvSubscriber) -> None:
        """Add what the receiver counted since the last time; its thread alone writes the counts."""
        counts = subscriber.counts
        self._metrics.add(table.KV_RECEIVED_MESSAGES, self._increase("received", "", counts.received))
        self._metrics.add(table.KV_RECEIVED_OK, self._increase("accepted", "", counts.accepted))
        self._metrics.add(table.KV_DROPPED_MESSAGES, self._increase("dropped", "", counts.dropped))
        for reason in KvSkip:
            self._metrics.add(
                table.KV_RECEIVED_SKIPPED, self._increase("skipped", reason, counts.skipped[reason]), reason
            )
        for endpoint, sequence in subscriber.sequences().items():
            for count in fields(SequenceCounts):
                increase = self._increase(endpoint, count.name, getattr(sequence, count.name))
                self._metrics.add(table.KV_SEQUENCE, increase, count.name)

    def _increase(self, kind: str, name: str, value: int) -> int:
        before = self._exported.get((kind, name), 0)
        self._exported[kind, name] = value
        return value - before
