"""OTLP over gRPC and HTTP."""

from __future__ import annotations

from .otlp_grpc import METHOD
from .reception import Reception

__all__ = [
    "METHOD",
    "Reception",
]
