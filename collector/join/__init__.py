"""Engines in order: what was decoded becomes rows."""

from __future__ import annotations

from .api_process import ApiProcess
from .api_spans import ApiSpans
from .block_ratio import BlockRatio
from .dedupe import EmitterIds, SpanWindow
from .emitter import Emitter, Key, facts_of
from .engine import Engine
from .engine_process import EngineProcess, PendingRequest
from .events import Described, Event, Renamed, Rows, Succeeded
from .giving_up import give_up_oldest
from .joiner import Joiner
from .release import Release
from .waiting import Waiting
from .window import REBUILT_DTYPE, StepWindow

__all__ = [
    "REBUILT_DTYPE",
    "ApiProcess",
    "ApiSpans",
    "BlockRatio",
    "Described",
    "Emitter",
    "EmitterIds",
    "Engine",
    "EngineProcess",
    "Event",
    "Joiner",
    "Key",
    "PendingRequest",
    "Release",
    "Renamed",
    "Rows",
    "SpanWindow",
    "StepWindow",
    "Succeeded",
    "Waiting",
    "facts_of",
    "give_up_oldest",
]
