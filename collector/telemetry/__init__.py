"""Every way to lose something, and our own metrics."""

from __future__ import annotations

from . import table
from .metrics import Counts, Metrics
from .reasons import (
    ForwardOutcome,
    JoinEvent,
    Outcome,
    PullOutcome,
    Restored,
    RowDrop,
    Signal,
    Skip,
    Transport,
)

__all__ = [
    "Counts",
    "ForwardOutcome",
    "JoinEvent",
    "Metrics",
    "Outcome",
    "PullOutcome",
    "Restored",
    "RowDrop",
    "Signal",
    "Skip",
    "Transport",
    "table",
]
