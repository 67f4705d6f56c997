"""KV events: their owners, their timeline, prefix-cache hits."""

from __future__ import annotations

from .owners import KvSources
from .prefix_hits import Prefill, Prefills
from .step_events import KvSteps
from .timeline import BATCH_DTYPE, ENTRY_DTYPE, KvTimeline

__all__ = [
    "BATCH_DTYPE",
    "ENTRY_DTYPE",
    "KvSources",
    "KvSteps",
    "KvTimeline",
    "Prefill",
    "Prefills",
]
