"""What survives, and in which order."""

from __future__ import annotations

from .journal import fitted_capacity
from .keeper import Durability
from .store import JOIN, PROGRESS, SPANS, STATE_FILES, Directory, Progress, StateStore, progress_of, read_image

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
