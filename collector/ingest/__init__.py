"""Bytes in: the counting walk, admission, status codes; what an export is."""

from __future__ import annotations

from .access import TokenFile
from .intake import BATCH_BYTES, AdmissionQueue, Export, Intake, QueueBatch, count_spans, newest_end_unix_nano

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
