"""What telemetry does not tell exactly is rebuilt: steps from summaries and journeys, batches from request spans."""

from __future__ import annotations

from .calibration import EngineCalibration, Sums
from .journeys import (
    NATURAL,
    PrefillChunks,
    find_residencies,
    project_onto_steps,
    split_chunks,
    waiting_steps,
)
from .kv import KvSources, KvTimeline, schedule_starts
from .occupancy import ApiProcess
from .sampling import NEARLY_WHOLE, WHOLE, doubts_of
from .steps import best_stamps, final_steps, leading, overlaps, step_features, trusted_missing_steps

__all__ = [
    "NATURAL",
    "NEARLY_WHOLE",
    "WHOLE",
    "ApiProcess",
    "EngineCalibration",
    "KvSources",
    "KvTimeline",
    "PrefillChunks",
    "Sums",
    "best_stamps",
    "doubts_of",
    "final_steps",
    "find_residencies",
    "leading",
    "overlaps",
    "project_onto_steps",
    "schedule_starts",
    "split_chunks",
    "step_features",
    "trusted_missing_steps",
    "waiting_steps",
]
