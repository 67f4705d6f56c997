"""Bytes to telemetry: columns for steps, records for requests."""

from __future__ import annotations

from . import wire
from .columnar import Decoder
from .records import (
    MISSING,
    STEP_DTYPE,
    ApiSpan,
    CoreSpan,
    Finish,
    Mark,
    RequestSpan,
    SnapshotColumns,
    StepColumns,
    Telemetry,
)
from .spans import latest_unix_ns
from .vocabulary import MarkKind
from .wire import SlimExport, TooManyObjects, json_to_protobuf, parts_by_emitter

__all__ = [
    "MISSING",
    "STEP_DTYPE",
    "ApiSpan",
    "CoreSpan",
    "Decoder",
    "Finish",
    "Mark",
    "MarkKind",
    "RequestSpan",
    "SlimExport",
    "SnapshotColumns",
    "StepColumns",
    "Telemetry",
    "TooManyObjects",
    "json_to_protobuf",
    "latest_unix_ns",
    "parts_by_emitter",
    "wire",
]
