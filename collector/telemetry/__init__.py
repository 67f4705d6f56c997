"""Every way to lose something, and our own metrics."""

from __future__ import annotations

from . import table
from .metrics import Counts, Metrics
from .reasons import (
    Asked,
    ForwardOutcome,
    JoinEvent,
    Outcome,
    PluginLoss,
    Restored,
    RowDrop,
    Signal,
    Skip,
    Stall,
    Transport,
)

__all__ = [
    "Asked",
    "Counts",
    "ForwardOutcome",
    "JoinEvent",
    "Metrics",
    "Outcome",
    "PluginLoss",
    "Restored",
    "RowDrop",
    "Signal",
    "Skip",
    "Stall",
    "Transport",
    "table",
]
