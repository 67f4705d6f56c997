"""The one thread that decodes, joins, learns and publishes, and what of it survives a restart."""

from __future__ import annotations

from .checkpoint import ALL_NAME, STATE_FILES, STATES_NAME, Directory, check_directory, is_pooled, state_files
from .durability import Durability, fitted_capacity
from .pipeline import TAKE_BYTES, Correlator, Pipeline, check_learning, make_pipeline
from .publish import Publisher, SnapshotWriter
from .watches import EventTime, MemoryLimiter
from .worker import Worker

__all__ = [
    "ALL_NAME",
    "STATES_NAME",
    "STATE_FILES",
    "TAKE_BYTES",
    "Correlator",
    "Directory",
    "Durability",
    "EventTime",
    "MemoryLimiter",
    "Pipeline",
    "Publisher",
    "SnapshotWriter",
    "Worker",
    "check_directory",
    "check_learning",
    "fitted_capacity",
    "is_pooled",
    "make_pipeline",
    "state_files",
]
