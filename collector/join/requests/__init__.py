"""Journeys and occupancy: what requests say of steps, and rows of their own."""

from __future__ import annotations

from .api_queueing import HANDOFFS_MAX, ApiQueueing, with_handoffs
from .decode_batch import HeldRequest
from .journeys import Chunks, Run, extent_of, runs
from .occupancy import RequestSequence
from .request_rows import QUEUE_STATE_AGE_NS, RequestRow, request_block, rows_of

__all__ = [
    "HANDOFFS_MAX",
    "QUEUE_STATE_AGE_NS",
    "ApiQueueing",
    "Chunks",
    "HeldRequest",
    "RequestRow",
    "RequestSequence",
    "Run",
    "extent_of",
    "request_block",
    "rows_of",
    "runs",
    "with_handoffs",
]
