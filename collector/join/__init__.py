"""Engines in order: what was decoded becomes rows."""

from __future__ import annotations

from .checkpoint import CheckpointError
from .continued import together
from .dedupe import SpanWindow
from .emitter import Emitter, Key, facts_of
from .engine import Engine
from .events import Described, Event, Renamed, Restarted, Rows, Succeeded
from .giving_up import give_up_oldest
from .joiner import Joiner
from .waiting import Waiting

__all__ = [
    "CheckpointError",
    "Described",
    "Emitter",
    "Engine",
    "Event",
    "Joiner",
    "Key",
    "Renamed",
    "Restarted",
    "Rows",
    "SpanWindow",
    "Succeeded",
    "Waiting",
    "facts_of",
    "give_up_oldest",
    "together",
]
