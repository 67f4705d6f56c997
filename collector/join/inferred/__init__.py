"""What telemetry does not tell exactly is rebuilt: steps from summaries and journeys, batches from request spans."""

from __future__ import annotations

from .context import Scheduling, SchedulingVotes, Sums
from .journeys import (
    QUEUE_STATE_AGE_NS,
    RequestRow,
    extent_of,
    lay_journey,
    request_block,
    rows_of,
    runs_of,
    split_chunks,
)
from .kv import KvSources
from .occupancy import ApiProcess, doubts_of
from .row_blocks import BlockRatio
from .sequence import StepSequence, WarmUp

__all__ = [
    "QUEUE_STATE_AGE_NS",
    "ApiProcess",
    "BlockRatio",
    "KvSources",
    "RequestRow",
    "Scheduling",
    "SchedulingVotes",
    "StepSequence",
    "Sums",
    "WarmUp",
    "doubts_of",
    "extent_of",
    "lay_journey",
    "request_block",
    "rows_of",
    "runs_of",
    "split_chunks",
]
