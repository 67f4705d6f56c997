"""KV-cache events over ZMQ."""

from __future__ import annotations

from .kv_intake import KvIntake, check_kv

__all__ = [
    "KvIntake",
    "check_kv",
]
