"""Engines in order: what was decoded becomes rows."""

from __future__ import annotations

from .api_process import ApiProcess
from .block_ratio import BlockRatio
from .dedupe import Emitter, SpanWindow
from .engine import Engine, PendingRequest, Process
from .joiner import Joined, Joiner
from .release import Release
from .window import REBUILT_DTYPE, StepWindow

__all__ = [
    "REBUILT_DTYPE",
    "ApiProcess",
    "BlockRatio",
    "Emitter",
    "Engine",
    "Joined",
    "Joiner",
    "PendingRequest",
    "Process",
    "Release",
    "SpanWindow",
    "StepWindow",
]
