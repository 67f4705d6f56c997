"""KV events: their owners, their timeline, prefix-cache hits."""

from __future__ import annotations

from .owners import KvSources, KvSteps

__all__ = [
    "KvSources",
    "KvSteps",
]
