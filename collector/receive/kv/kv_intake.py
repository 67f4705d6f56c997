"""KV events between their receiver and the worker: taken in batches, every count of the receiver in the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from collector.config import ConfigError, KvConfig
from collector.decode.kv import KvBatch
from collector.runtime import Clock, Health
from collector.telemetry import Counts, Metrics, table

from .kv_zmq import NO_PACKAGE, KvSubscriber, KvUnavailable


def check_kv(settings: KvConfig) -> None:
    """ConfigError where endpoints are configured and pyzmq is not installed; imports nothing, opens nothing."""
    if settings.endpoints and find_spec("zmq") is None:
        raise ConfigError("receivers.kv.endpoints", NO_PACKAGE)


class KvIntake:
    """The subscriber, if endpoints are configured; without them nothing is opened and pyzmq is not needed."""

    def __init__(self, settings: KvConfig, metrics: Metrics, clock: Clock, health: Health) -> None:
        self._metrics = metrics
        self._subscriber = KvSubscriber(settings, clock, health) if settings.endpoints else None
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
