"""Bytes in: the counting walk, admission, status codes; what an export is."""

from __future__ import annotations

from .admission import BATCH_BYTES, AdmissionQueue, QueueBatch
from .auth import TokenFile
from .count import count_spans, newest_end_unix_nano
from .export_request import Export
from .intake import Intake

__all__ = [
    "BATCH_BYTES",
    "AdmissionQueue",
    "Export",
    "Intake",
    "QueueBatch",
    "TokenFile",
    "count_spans",
    "newest_end_unix_nano",
]
