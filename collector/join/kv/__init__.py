"""KV events: their owners, their timeline, prefix-cache hits."""

from __future__ import annotations

from .owners import KvSources
from .step_events import KvSteps

__all__ = [
    "KvSources",
    "KvSteps",
]
