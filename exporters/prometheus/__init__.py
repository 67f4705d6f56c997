"""A snapshot as Prometheus metrics."""

from __future__ import annotations

from .exposition import MetricsPage

__all__ = [
    "MetricsPage",
]
