"""One engine process: step sequences, their frontier and holes, and the rows they give."""

from __future__ import annotations

from .process_context import Scheduling, Sums
from .sequence import StepSequence, WarmUp

__all__ = [
    "Scheduling",
    "StepSequence",
    "Sums",
    "WarmUp",
]
