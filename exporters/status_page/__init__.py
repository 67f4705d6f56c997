"""The status page."""

from __future__ import annotations

from .status_page import StatusPage
from .text import duration, escape

__all__ = [
    "StatusPage",
    "duration",
    "escape",
]
