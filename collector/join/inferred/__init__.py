"""What telemetry does not tell exactly is rebuilt: steps from summaries and journeys, batches from request spans."""

from __future__ import annotations

from .calibration import EngineCalibration, SchedulingVotes, Sums
from .kv import KvSources, KvTimeline
from .occupancy import ApiProcess
from .process import EngineProcess, PendingRequest
from .sampling import NEARLY_WHOLE, WHOLE, doubts_of

__all__ = [
    "NEARLY_WHOLE",
    "WHOLE",
    "ApiProcess",
    "EngineCalibration",
    "EngineProcess",
    "KvSources",
    "KvTimeline",
    "PendingRequest",
    "SchedulingVotes",
    "Sums",
    "doubts_of",
]
