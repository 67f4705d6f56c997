"""Every way to lose something, and our own metrics."""

from __future__ import annotations

from . import table
from .metrics import Counts, Metrics
from .reasons import (
    GPU,
    Direction,
    DiscoveryOutcome,
    ForwardOutcome,
    FpmSkip,
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
    Signal,
    Skip,
    Stall,
    Transport,
)

__all__ = [
    "GPU",
    "Counts",
    "Direction",
    "DiscoveryOutcome",
    "ForwardOutcome",
    "FpmSkip",
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
    "Signal",
    "Skip",
    "Stall",
    "Transport",
    "table",
]
