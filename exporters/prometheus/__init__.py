"""A snapshot as Prometheus metrics."""

from __future__ import annotations

from .advisory import Advisory
from .exposition import MetricsPage

__all__ = [
    "Advisory",
    "MetricsPage",
]
