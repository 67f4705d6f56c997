"""Bytes in, in one loop: OTLP over gRPC and HTTP, KV events, scraped pages; access; the queue to the worker."""

from __future__ import annotations

from .access import TokenFile, read_credentials
from .forward import check_forward, make_forwarder
from .intake import Intake
from .queue import BATCH_S, AdmissionQueue, QueueBatch

__all__ = [
    "BATCH_S",
    "AdmissionQueue",
    "Intake",
    "QueueBatch",
    "TokenFile",
    "check_forward",
    "make_forwarder",
    "read_credentials",
]
