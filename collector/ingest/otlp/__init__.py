"""OTLP over gRPC and HTTP."""

from __future__ import annotations

from .otlp_grpc import METHOD
from .otlp_grpc import THREADS as GRPC_THREADS
from .receivers import Receivers, make_receivers, read_credentials

__all__ = [
    "GRPC_THREADS",
    "METHOD",
    "Receivers",
    "make_receivers",
    "read_credentials",
]
