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
from .steps import StepView, completed_steps, drops, step_features, trusted_missing_steps

__all__ = [
    "NATURAL",
    "NEARLY_WHOLE",
    "WHOLE",
    "ApiProcess",
    "EngineCalibration",
    "KvSources",
    "KvTimeline",
    "PrefillChunks",
    "StepView",
    "Sums",
    "completed_steps",
    "doubts_of",
    "drops",
    "find_residencies",
    "project_onto_steps",
    "schedule_starts",
    "split_chunks",
    "step_features",
    "trusted_missing_steps",
    "waiting_steps",
]
