"""Bytes in, in one loop: OTLP over gRPC and HTTP, KV events, scraped pages; access; the queue to the worker."""

from __future__ import annotations

from .access import TokenFile, read_credentials, warn_of_open_ports
from .forward import check_forward, make_forwarder
from .intake import Intake, ReceiveBudget, count_spans, newest_end_unix_nano
from .queue import BATCH_S, TAKE_BYTES, AdmissionQueue, Export, QueueBatch

__all__ = [
    "BATCH_S",
    "TAKE_BYTES",
    "AdmissionQueue",
    "Export",
    "Intake",
    "QueueBatch",
    "ReceiveBudget",
    "TokenFile",
    "check_forward",
    "count_spans",
    "make_forwarder",
    "newest_end_unix_nano",
    "read_credentials",
    "warn_of_open_ports",
]
