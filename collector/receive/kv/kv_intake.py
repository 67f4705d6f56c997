"""KV events between their receiver and the worker: taken in batches, every count of the receiver in the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from collector.config import ConfigError, KvConfig
from collector.decode.kv import KvBatch
from collector.runtime import Clock, Health
from collector.telemetry import KvSkip, Metrics, SequenceCounts, table

from .kv_zmq import KvSubscriber, KvUnavailable

NAME = "kv-receiver"
CHECK_IN_TIMEOUT_S = 60.0
"""Its thread takes a turn every half second; a turn that reads a thousand of the largest messages takes a while."""


class KvIntake:
    """The subscriber, if endpoints are configured; without them nothing is opened and pyzmq is not needed."""

    def __init__(self, settings: KvConfig, metrics: Metrics, clock: Clock, health: Health) -> None:
        self._metrics = metrics
        self._health = health
        self._subscriber = (
            KvSubscriber(settings, lambda: clock.monotonic_ns() / 1e9, check_in=lambda: health.check_in(NAME))
            if settings.endpoints
            else None
        )
        self._told: dict[tuple[str, str], int] = {}
        metrics.follow(table.KV_QUEUE, lambda: self._subscriber.queued if self._subscriber is not None else 0)

    def start(self) -> None:
        """Begin to listen; raises ConfigError when that is impossible, never waits for a publisher."""
        if self._subscriber is None:
            return
        try:
            self._subscriber.start()
        except KvUnavailable as error:
            raise ConfigError("receivers.kv.endpoints", str(error)) from None
        self._health.register(NAME, CHECK_IN_TIMEOUT_S)

    def stop(self) -> None:
        """Stop listening."""
        if self._subscriber is not None:
            self._health.unregister(NAME)
            self._subscriber.stop()

    def take(self) -> Sequence[KvBatch]:
        """What came since the last call."""
        one = self._subscriber
        if one is None:
            return ()
        batches = one.take()
        self._tell(one)
        return batches

    def _tell(self, one: KvSubscriber) -> None:
        """Add what the receiver counted since the last time; its thread alone writes the counts."""
        counts = one.counts
        self._metrics.add(table.KV_RECEIVED_MESSAGES, self._since("received", "", counts.received))
        self._metrics.add(table.KV_RECEIVED_OK, self._since("accepted", "", counts.accepted))
        self._metrics.add(table.KV_DROPPED_MESSAGES, self._since("dropped", "", counts.dropped))
        for reason in KvSkip:
            skipped = self._since("skipped", reason, counts.skipped[reason])
            self._metrics.add(table.KV_RECEIVED_SKIPPED, skipped, reason)
        for endpoint, sequence in one.sequences().items():
            for each in fields(SequenceCounts):
                new = self._since(endpoint, each.name, getattr(sequence, each.name))
                self._metrics.add(table.KV_SEQUENCE, new, each.name)

    def _since(self, kind: str, name: str, value: int) -> int:
        before = self._told.get((kind, name), 0)
        self._told[kind, name] = value
        return value - before
