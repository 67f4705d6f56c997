"""Engines in order: what was decoded becomes rows."""

from __future__ import annotations

from .api_queueing import with_stand_ins
from .checkpoint import CheckpointError
from .emitter import Emitter, Key, Scheduling, facts_of
from .engine import Engine
from .events import Described, Event, Pending, Renamed, Restarted, Rows, Succeeded
from .joiner import Joiner
from .spans import SpanWindow

__all__ = [
    "CheckpointError",
    "Described",
    "Emitter",
    "Engine",
    "Event",
    "Joiner",
    "Key",
    "Pending",
    "Renamed",
    "Restarted",
    "Rows",
    "Scheduling",
    "SpanWindow",
    "Succeeded",
    "facts_of",
    "with_stand_ins",
]
