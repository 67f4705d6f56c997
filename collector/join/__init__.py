"""Engines in order: what was decoded becomes rows."""

from __future__ import annotations

from .checkpoint import CheckpointError
from .dedupe import SpanWindow
from .emitter import Emitter, Key, facts_of
from .engine import Engine
from .events import Described, Event, Renamed, Restarted, Rows, Succeeded
from .joiner import Joiner
from .pending import Pending

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
    "SpanWindow",
    "Succeeded",
    "facts_of",
]
