"""Bytes to telemetry: columns for steps, records for requests."""

from __future__ import annotations

from .records import (
    STEP_DTYPE,
    ApiSpan,
    CoreSpan,
    Finish,
    RequestSpan,
    SnapshotColumns,
    SpanEvent,
    StepColumns,
    Telemetry,
)
from .spans import decode_exports, latest_unix_ns
from .vocabulary import MISSING, SpanEventKind, is_here
from .wire import (
    LARGE_BYTES,
    SMALL_BYTES,
    Export,
    has_too_many_values,
    json_to_protobuf,
    parts_by_emitter,
    read_span_ends,
)

__all__ = [
    "LARGE_BYTES",
    "MISSING",
    "SMALL_BYTES",
    "STEP_DTYPE",
    "ApiSpan",
    "CoreSpan",
    "Export",
    "Finish",
    "RequestSpan",
    "SnapshotColumns",
    "SpanEvent",
    "SpanEventKind",
    "StepColumns",
    "Telemetry",
    "decode_exports",
    "has_too_many_values",
    "is_here",
    "json_to_protobuf",
    "latest_unix_ns",
    "parts_by_emitter",
    "read_span_ends",
]
