"""KV-cache events over ZMQ."""

from __future__ import annotations

from .kv_intake import KvIntake

__all__ = [
    "KvIntake",
]
