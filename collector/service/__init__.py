"""The one thread that decodes, joins, learns and publishes, and what of it survives a restart."""

from __future__ import annotations

from .build import check_learning, make_pipeline
from .correlator import Correlator
from .event_time import EventTime
from .journal import fitted_capacity
from .keeper import Durability
from .memory_relief import MemoryRelief
from .pipeline import Pipeline
from .publish import Publisher, SnapshotWriter
from .stall import StallWatch
from .store import STATE_FILES, Directory, StateStore, progress_of, read_image
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
    "StateStore",
    "Worker",
    "check_learning",
    "fitted_capacity",
    "make_pipeline",
    "progress_of",
    "read_image",
]
