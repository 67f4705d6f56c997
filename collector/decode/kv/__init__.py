"""KV-cache events, as messages and as span events."""

from __future__ import annotations

from .layouts import KvBatch, count_batch
from .messages import LINE_MARK, read_frames, read_line, read_span_events

__all__ = [
    "LINE_MARK",
    "KvBatch",
    "count_batch",
    "read_frames",
    "read_line",
    "read_span_events",
]
