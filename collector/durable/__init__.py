"""What survives, and in which order."""

from __future__ import annotations

from .directory import Directory
from .image import JOIN, PROGRESS, SPANS, Progress, progress_of, read_image
from .keeper import Durability

__all__ = [
    "JOIN",
    "PROGRESS",
    "SPANS",
    "Directory",
    "Durability",
    "Progress",
    "progress_of",
    "read_image",
]
