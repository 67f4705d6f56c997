"""Engines in order: what was decoded becomes rows."""

from __future__ import annotations

from .api_queueing import with_fallbacks
from .checkpoint import CheckpointError
from .emitter import Emitter, Key, Scheduling, facts_of, newest_unix_ns, quality_of, replaced_configs
from .engine import Engine
from .events import ConfigKeyChanged, ConfigReplaced, ConfigUpdated, Event, Pending, Rows
from .joiner import Joiner
from .spans import SpanWindow

__all__ = [
    "CheckpointError",
    "ConfigKeyChanged",
    "ConfigReplaced",
    "ConfigUpdated",
    "Emitter",
    "Engine",
    "Event",
    "Joiner",
    "Key",
    "Pending",
    "Rows",
    "Scheduling",
    "SpanWindow",
    "facts_of",
    "newest_unix_ns",
    "quality_of",
    "replaced_configs",
    "with_fallbacks",
]
