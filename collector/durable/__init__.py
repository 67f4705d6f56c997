"""What survives, and in which order."""

from __future__ import annotations

from .codec import LayoutError
from .image import learners_of
from .keeper import Durability
from .state_steps import Context

__all__ = [
    "Context",
    "Durability",
    "LayoutError",
    "learners_of",
]
