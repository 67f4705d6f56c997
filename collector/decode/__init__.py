"""Bytes to telemetry: columns for steps, records for requests."""

from __future__ import annotations

from .envelope import FIELDS_MAX, LARGE_BYTES, SMALL_BYTES, Export, read_span_ends
from .records import (
    MISSING,
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
from .vocabulary import SpanEventKind
from .wire import count_json_values, json_to_protobuf, parts_by_emitter

__all__ = [
    "FIELDS_MAX",
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
    "count_json_values",
    "decode_exports",
    "json_to_protobuf",
    "latest_unix_ns",
    "parts_by_emitter",
    "read_span_ends",
]
