"""Files as a source."""

from __future__ import annotations

from .reader import Recording, Timed, TimedExport, TimedKv, TimedPage, in_batches, merged
from .sources import by_source, open_recordings

__all__ = [
    "Recording",
    "Timed",
    "TimedExport",
    "TimedKv",
    "TimedPage",
    "by_source",
    "in_batches",
    "merged",
    "open_recordings",
]
