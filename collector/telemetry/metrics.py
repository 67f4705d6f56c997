"""Counters of the process: counted anywhere by the rows of the table, exposed in one place.

    counts[DECODED_SPANS, reason] += 1        counts[KV_MISSING,] += 3

Counts are not safe from several threads; whoever takes them adds them to the live metrics, which are. Of these every
known label set starts at 0, so that an alert on a rate never misses its first increase. prometheus_client is imported
when a registry is filled: a replay has none, and the import costs more than its smallest file.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from collector import __version__

from .table import BUILD_INFO, PREFIX, TABLE, Metric

Row = tuple[Metric, *tuple[str, ...]]
"""A metric and its label values in the table's order."""


class Counts(dict[Row, float]):
    """Numbers by row; what was never counted is 0. A gauge's number is its state, a counter's what was added."""

    __slots__ = ()

    def __missing__(self, row: Row) -> int:
        """Return 0 without storing it."""
        return 0

    def merge(self, other: Counts) -> None:
        """Add other counts; the other's value of a gauge is the newer one."""
        for row, number in other.items():
            self[row] = self[row] + number if row[0].is_counter else number


class Metrics:
    """The table as live objects of a registry of its own; safe from any thread.

    Raises:
        KeyError: on a label value outside its closed set.
        AttributeError: on setting or following a counter.
    """

    def __init__(self, table: tuple[Metric, ...] = TABLE) -> None:
        from prometheus_client import (  # noqa: PLC0415 -- see above
            CollectorRegistry,
            Counter,
            Gauge,
            PlatformCollector,
            ProcessCollector,
            disable_created_metrics,
        )

        disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the counter series
        self.registry = registry = CollectorRegistry()
        self._live: dict[Row, Any] = {}
        for metric in table:
            make = Counter if metric.is_counter else Gauge
            names, closed = [label for label, _ in metric.labels], [values for _, values in metric.labels]
            whole = make(PREFIX + metric.name, metric.help, names, registry=registry)
            for labels in product(*closed):
                self._live[metric, *labels] = whole.labels(*labels) if labels else whole
        self.set(BUILD_INFO, 1, __version__)
        # They sit on the global registry only; one of our own gets them by hand.
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

    def add(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        """Raise a counter; label values in the table's order."""
        self._live[metric, *labels].inc(amount)

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a gauge to a value."""
        self._live[metric, *labels].set(value)

    def follow(self, metric: Metric, read: Callable[[], float], *labels: str) -> None:
        """Let a gauge read its value at every scrape."""
        self._live[metric, *labels].set_function(read)

    def merge(self, counts: Counts) -> None:
        """Add what was counted elsewhere; of a gauge, take its state."""
        for row, number in counts.items():
            live = self._live[row]
            (live.inc if row[0].is_counter else live.set)(number)
