"""The one thread that decodes, joins, learns and publishes, and what of it survives a restart."""

from __future__ import annotations

from .build import check_learning, make_pipeline
from .checkpoint import STATE_FILES, Directory
from .correlator import Correlator
from .durability import Durability, fitted_capacity
from .event_time import EventTime
from .memory_relief import MemoryRelief
from .pipeline import Pipeline
from .publish import Publisher, SnapshotWriter
from .stall import StallWatch
from .worker import Worker

__all__ = [
    "STATE_FILES",
    "Correlator",
    "Directory",
    "Durability",
    "EventTime",
    "MemoryRelief",
    "Pipeline",
    "Publisher",
    "SnapshotWriter",
    "StallWatch",
    "Worker",
    "check_learning",
    "fitted_capacity",
    "make_pipeline",
]
