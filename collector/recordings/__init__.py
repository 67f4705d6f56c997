"""Files as a source."""

from __future__ import annotations

from .reader import (
    FILE_TRANSPORT,
    Recording,
    Timed,
    TimedExport,
    TimedKv,
    TimedPage,
    in_batches,
    merged,
    merged_with_progress,
)
from .sources import STDIN, by_source, open_recordings, recording_files, source_of

__all__ = [
    "FILE_TRANSPORT",
    "STDIN",
    "Recording",
    "Timed",
    "TimedExport",
    "TimedKv",
    "TimedPage",
    "by_source",
    "in_batches",
    "merged",
    "merged_with_progress",
    "open_recordings",
    "recording_files",
    "source_of",
]
