"""The one thread that decodes, joins, learns and publishes, and what of it survives a restart."""

from __future__ import annotations

from .checkpoint import NAME as STATE_NAME
from .checkpoint import STATES_NAME, Directory, state_files
from .durability import Durability
from .log import Log
from .pipeline import TAKE_BYTES, Pipeline, check_learning, hides_hits, make_pipeline
from .publish import Publisher, SnapshotWriter
from .watches import EventTime, MemoryLimiter
from .worker import Worker

__all__ = [
    "STATES_NAME",
    "STATE_NAME",
    "TAKE_BYTES",
    "Directory",
    "Durability",
    "EventTime",
    "Log",
    "MemoryLimiter",
    "Pipeline",
    "Publisher",
    "SnapshotWriter",
    "Worker",
    "check_learning",
    "hides_hits",
    "make_pipeline",
    "state_files",
]
