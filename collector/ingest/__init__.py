"""Bytes in, in one loop: OTLP over gRPC and HTTP, KV events, pages, discovery; access; the queue to the worker."""

from __future__ import annotations

from .access import TokenFile, read_credentials
from .consumer import ExportConsumer
from .forward import Forwarder
from .queue import BATCH_S, ExportQueue

__all__ = [
    "BATCH_S",
    "ExportConsumer",
    "ExportQueue",
    "Forwarder",
    "TokenFile",
    "read_credentials",
]
