"""Journeys and occupancy: what requests say of steps, and rows of their own."""

from __future__ import annotations

from .api_queueing import ApiQueueing, BusyArrival, Piece, with_stand_ins
from .journeys import (
    QUEUE_STATE_AGE_NS,
    Chunks,
    RequestRow,
    Run,
    extent_of,
    lay_journey,
    request_block,
    rows_of,
    runs_of,
    split_chunks,
    waiting_steps,
)
from .occupancy import RequestSequence, doubts_of

__all__ = [
    "QUEUE_STATE_AGE_NS",
    "ApiQueueing",
    "BusyArrival",
    "Chunks",
    "Piece",
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
