"""Every way to lose something, and our own metrics."""

from __future__ import annotations

from . import table
from .counts import Counts, SequenceCounts
from .metrics import Metrics
from .reasons import (
    GPU,
    Direction,
    DiscoveryOutcome,
    JoinEvent,
    KvSkip,
    Malformed,
    Outcome,
    Phase,
    Refusal,
    Restored,
    RowDrop,
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
    "Malformed",
    "Metrics",
    "Outcome",
    "Phase",
    "Refusal",
    "Restored",
    "RowDrop",
    "SequenceCounts",
    "Skip",
    "Stall",
    "Transport",
    "table",
]
