"""The one thread: decode, join, learn, publish."""

from __future__ import annotations

from .build import check_learning, make_pipeline
from .correlator import Correlator
from .memory_relief import MemoryRelief
from .pipeline import Pipeline
from .publish import Publisher, SnapshotWriter
from .silence import SilenceWatch
from .stall import StallWatch
from .worker import Worker

__all__ = [
    "Correlator",
    "MemoryRelief",
    "Pipeline",
    "Publisher",
    "SilenceWatch",
    "SnapshotWriter",
    "StallWatch",
    "Worker",
    "check_learning",
    "make_pipeline",
]
