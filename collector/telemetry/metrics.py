"""The table of our own metrics as live objects of one registry.

Every known label set starts at 0, so that an alert on a rate never misses its first increase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from collector import __version__

from .table import (
    BUILD_INFO,
    DECODED_EVENTS,
    DECODED_EVENTS_OK,
    DECODED_SPANS,
    DECODED_SPANS_OK,
    DECODED_SUMMARIES,
    DROPPED_ROWS,
    EVICTIONS,
    IGNORED_ATTRIBUTES,
    JOIN_EVENTS,
    KV_BLOCKS,
    KV_EVENTS,
    KV_EVENTS_OK,
    KV_EVENTS_SKIPPED,
    KV_HELD,
    KV_HIT_TOKENS,
    KV_MESSAGES,
    KV_MESSAGES_OK,
    KV_MESSAGES_SKIPPED,
    KV_MISSING,
    KV_TRANSFERS,
    KV_UNBOUND,
    PREFIX,
    QUARANTINED,
    QUARANTINES,
    ROWS,
    SDK_DROPPED_EVENTS,
    SKIPPED_EVENTS,
    SKIPPED_SPANS,
    TABLE,
    Kind,
    Metric,
)

if TYPE_CHECKING:
    from collector.decode import Tally
    from collector.decode.kv import KvTally
    from collector.worker import Counts

R = TypeVar("R", bound=str)


class Metrics:
    """The table as live objects of one registry; safe from any thread."""

    def __init__(self, registry: CollectorRegistry, table: tuple[Metric, ...] = TABLE) -> None:
        self.registry = registry
        self._children: dict[tuple[str, tuple[str, ...]], Counter | Gauge | Histogram] = {}
        for metric in table:
            self._register(metric)
        self.set(BUILD_INFO, 1, __version__)
        # They sit on the global registry only; one of our own gets them by hand.
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

    def add(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        """Raise a counter; label values in the table's order."""
        child = self._child(metric, labels)
        if not isinstance(child, Counter):
            raise TypeError(f"{metric.name} is no counter")
        child.inc(amount)

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a gauge."""
        child = self._child(metric, labels)
        if not isinstance(child, Gauge):
            raise TypeError(f"{metric.name} is no gauge")
        child.set(value)

    def follow(self, metric: Metric, read: Callable[[], float]) -> None:
        """Let a gauge without labels read its value at every scrape."""
        child = self._child(metric, ())
        if not isinstance(child, Gauge):
            raise TypeError(f"{metric.name} is no gauge")
        child.set_function(read)

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Put a value into a histogram."""
        child = self._child(metric, labels)
        if not isinstance(child, Histogram):
            raise TypeError(f"{metric.name} is no histogram")
        child.observe(value)

    def value(self, metric: Metric, *labels: str) -> float:
        """What a counter or gauge stands at."""
        values = dict(zip((name for name, _ in metric.labels), labels, strict=True))
        return self.registry.get_sample_value(metric.exposed_name, values) or 0.0

    def merge(self, counts: Counts) -> None:
        """Add what the pipeline counted."""
        self._merge_tally(counts.tally)
        for (target, outcome), rows in counts.rows.items():
            self.add(ROWS, rows, target, outcome)
        self._merge_reasons(DROPPED_ROWS, counts.drops)
        self._merge_reasons(JOIN_EVENTS, counts.events)
        self._merge_kv(counts.kv)
        self.add(QUARANTINES, counts.quarantines)
        self.set(QUARANTINED, counts.quarantined)
        self.add(EVICTIONS, counts.evictions)

    def _merge_tally(self, tally: Tally) -> None:
        self.add(DECODED_SPANS, tally.spans_received)
        self.add(DECODED_SPANS_OK, tally.spans_accepted)
        self.add(DECODED_EVENTS, tally.events_received)
        self.add(DECODED_EVENTS_OK, tally.events_accepted)
        self.add(DECODED_SUMMARIES, tally.summaries_columnar, "columnar")
        self.add(DECODED_SUMMARIES, tally.summaries_plain, "plain")
        self.add(SDK_DROPPED_EVENTS, tally.events_dropped_by_sdk)
        self.add(IGNORED_ATTRIBUTES, tally.attributes_ignored)
        self._merge_reasons(SKIPPED_SPANS, tally.spans_skipped)
        self._merge_reasons(SKIPPED_EVENTS, tally.events_skipped)

    def _merge_kv(self, tally: KvTally) -> None:
        self.add(KV_MESSAGES, tally.messages_received)
        self.add(KV_MESSAGES_OK, tally.messages_accepted)
        self._merge_reasons(KV_MESSAGES_SKIPPED, tally.messages_skipped)
        self.add(KV_EVENTS, tally.events_received)
        self.add(KV_EVENTS_OK, tally.events_accepted)
        self._merge_reasons(KV_EVENTS_SKIPPED, tally.events_skipped)
        for (direction, phase), transfers in tally.transfers.items():
            self.add(KV_TRANSFERS, transfers, direction, phase)
            self.add(KV_BLOCKS, tally.blocks[direction, phase], direction, phase)
        self.add(KV_HIT_TOKENS, tally.hit_tokens)
        self.set(KV_HELD, tally.held)
        self.set(KV_MISSING, tally.missing)
        self.set(KV_UNBOUND, tally.unbound)

    def _merge_reasons(self, metric: Metric, counts: Mapping[R, int]) -> None:
        for reason, count in counts.items():
            self.add(metric, count, reason)

    def _register(self, metric: Metric) -> None:
        name = PREFIX + metric.name
        names = [label for label, _ in metric.labels]
        made: Counter | Gauge | Histogram
        match metric.kind:
            case Kind.COUNTER:
                made = Counter(name, metric.help, names, registry=self.registry)
            case Kind.GAUGE:
                made = Gauge(name, metric.help, names, registry=self.registry)
            case Kind.HISTOGRAM:
                made = Histogram(name, metric.help, names, registry=self.registry, buckets=metric.buckets)
        self._children[metric.name, ()] = made
        for values in product(*(closed for _, closed in metric.labels)):
            if values:
                self._children[metric.name, values] = made.labels(*values)

    def _child(self, metric: Metric, labels: tuple[str, ...]) -> Counter | Gauge | Histogram:
        return self._children[metric.name, labels]
