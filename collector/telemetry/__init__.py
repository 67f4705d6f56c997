"""Every way to lose something, and our own metrics."""

from __future__ import annotations

from . import table
from .metrics import Counts, Metrics
from .reasons import (
    GPU,
    Direction,
    DiscoveryOutcome,
    JoinEvent,
    KvSkip,
    Outcome,
    Phase,
    PluginLoss,
    PullOutcome,
    Restored,
    RowDrop,
    ScrapeOutcome,
    SequenceEvent,
    Skip,
    Stall,
    Transport,
)

__all__ = [
    "GPU",
    "Counts",
    "Direction",
    "DiscoveryOutcome",
    "JoinEvent",
    "KvSkip",
    "Metrics",
    "Outcome",
    "Phase",
    "PluginLoss",
    "PullOutcome",
    "Restored",
    "RowDrop",
    "ScrapeOutcome",
    "SequenceEvent",
    "Skip",
    "Stall",
    "Transport",
    "table",
]
