"""What is counted between two looks of the worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SequenceCounts:
    """What happened to the numbers of one endpoint: missing = recovered + unrecoverable + still missing."""

    gaps: int = 0
    missing: int = 0
    recovered: int = 0
    unrecoverable: int = 0
    restarts: int = 0
    replays_requested: int = 0
    replays_finished: int = 0
    replays_unanswered: int = 0
