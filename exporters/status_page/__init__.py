"""The status page."""

from __future__ import annotations

from .status_page import StatusPage
from .text import duration, escape
from .waiting_section import EngineWaiting

__all__ = [
    "EngineWaiting",
    "StatusPage",
    "duration",
    "escape",
]
