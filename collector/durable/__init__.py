"""What survives, and in which order."""

from __future__ import annotations

from .directory import Directory
from .image import JOIN, PROGRESS, SPANS, Progress, progress_of, read_image
from .keeper import Durability
from .room import fitted_capacity
from .store import STATE_FILES, StateStore

__all__ = [
    "JOIN",
    "PROGRESS",
    "SPANS",
    "STATE_FILES",
    "Directory",
    "Durability",
    "Progress",
    "StateStore",
    "fitted_capacity",
    "progress_of",
    "read_image",
]
