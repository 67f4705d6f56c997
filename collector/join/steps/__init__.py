"""One engine process: step sequences, their frontier and holes, and the rows they give."""

from __future__ import annotations

from .scheduling import Scheduling
from .sequence import StepSequence
from .warm_up import WarmUp

__all__ = [
    "Scheduling",
    "StepSequence",
    "WarmUp",
]
