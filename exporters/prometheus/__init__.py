"""A snapshot as Prometheus metrics."""

from __future__ import annotations

from exporters.prometheus.advisory import Advisory
from exporters.prometheus.exposition import MetricsPage

__all__ = [
    "Advisory",
    "MetricsPage",
]
