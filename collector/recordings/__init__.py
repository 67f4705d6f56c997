"""Files as a source."""

from __future__ import annotations

from .reader import Recording, Timed, TimedExport, TimedKv, TimedPage, merged

__all__ = [
    "Recording",
    "Timed",
    "TimedExport",
    "TimedKv",
    "TimedPage",
    "merged",
]
