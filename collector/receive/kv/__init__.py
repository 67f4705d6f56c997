"""KV-cache events over ZMQ."""

from __future__ import annotations

from .kv_zmq import KvIntake, check_kv

__all__ = [
    "KvIntake",
    "check_kv",
]
