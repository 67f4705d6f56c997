"""Bytes in, in one loop: OTLP over gRPC and HTTP, KV events, pages, discovery; access; the queue to the worker."""

from __future__ import annotations

from .access import TokenFile, read_credentials
from .forward import Forwarder
from .intake import Intake
from .queue import BATCH_S, AdmissionQueue, QueueBatch

__all__ = [
    "BATCH_S",
    "AdmissionQueue",
    "Forwarder",
    "Intake",
    "QueueBatch",
    "TokenFile",
    "read_credentials",
]
