"""Journeys and occupancy: what requests say of steps, and rows of their own."""

from __future__ import annotations

from .api_queueing import ApiQueueing, with_stand_ins
from .journeys import Chunks, Run, extent_of, lay_journey, runs_of, split_chunks, waiting_steps
from .occupancy import RequestSequence
from .request_rows import QUEUE_STATE_AGE_NS, RequestRow, request_block, rows_of
from .trace_sampling import doubts_of

__all__ = [
    "QUEUE_STATE_AGE_NS",
    "ApiQueueing",
    "Chunks",
    "RequestRow",
    "RequestSequence",
    "Run",
    "doubts_of",
    "extent_of",
    "lay_journey",
    "request_block",
    "rows_of",
    "runs_of",
    "split_chunks",
    "waiting_steps",
    "with_stand_ins",
]
