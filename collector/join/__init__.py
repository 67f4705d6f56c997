"""Engines in order: what was decoded becomes rows."""

from __future__ import annotations

from .api_queueing import with_fallbacks
from .emitter import Emitter, Scheduling, facts_of, newest_unix_ns, quality_of, replaced_configs
from .engine import Engine
from .events import ConfigKeyChanged, ConfigReplaced, ConfigUpdated, Event, Rows
from .joiner import Joiner, Pending
from .spans import SpanWindow

__all__ = [
    "ConfigKeyChanged",
    "ConfigReplaced",
    "ConfigUpdated",
    "Emitter",
    "Engine",
    "Event",
    "Joiner",
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
