"""OTLP over gRPC and HTTP."""

from __future__ import annotations

from .otlp_grpc import METHOD
from .receivers import Receivers, make_receivers, read_credentials

__all__ = [
    "METHOD",
    "Receivers",
    "make_receivers",
    "read_credentials",
]
