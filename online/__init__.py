"""Learns, and nothing else: no I/O, no thread, no clock, no logging, nothing of ours imported."""

from __future__ import annotations

from .bank import Bank
from .blocks import Design, median_of, strata_of, stratum_name
from .level import Level
from .rows import (
    PHASES,
    REQUEST_FEATURES,
    STEP_FEATURES,
    Floats,
    Ints,
    Mask,
    Quality,
    RowBlock,
    RowOutcome,
    Target,
)
from .snapshot import (
    ConfigSnapshot,
    EngineSnapshot,
    FeatureSnapshot,
    IntervalSnapshot,
    ModelSnapshot,
    Reason,
    ReplicaSnapshot,
    ResidualSnapshot,
    Snapshot,
    TargetSnapshot,
)
from .state import StateError
from .target import HistoryView, check_settings

__all__ = [
    "PHASES",
    "REQUEST_FEATURES",
    "STEP_FEATURES",
    "Bank",
    "ConfigSnapshot",
    "Design",
    "EngineSnapshot",
    "FeatureSnapshot",
    "Floats",
    "HistoryView",
    "IntervalSnapshot",
    "Ints",
    "Level",
    "Mask",
    "ModelSnapshot",
    "Quality",
    "Reason",
    "ReplicaSnapshot",
    "ResidualSnapshot",
    "RowBlock",
    "RowOutcome",
    "Snapshot",
    "StateError",
    "Target",
    "TargetSnapshot",
    "check_settings",
    "median_of",
    "strata_of",
    "stratum_name",
]
