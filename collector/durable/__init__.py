"""What survives, and in which order."""

from __future__ import annotations

from .image import JOIN, PROGRESS, SPANS, Progress, progress_of, read_image
from .keeper import Durability

__all__ = [
    "JOIN",
    "PROGRESS",
    "SPANS",
    "Durability",
    "Progress",
    "progress_of",
    "read_image",
]
