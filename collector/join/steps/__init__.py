"""One engine process: step sequences, their frontier and holes, and the rows they give."""

from __future__ import annotations

from .frontier import Frontier
from .habits import Habits, Sums
from .process_context import ProcessContext
from .scheduling import Scheduling, SchedulingVotes
from .sequence import Advance, StepSequence
from .warm_up import WarmUp

__all__ = [
    "Advance",
    "Frontier",
    "Habits",
    "ProcessContext",
    "Scheduling",
    "SchedulingVotes",
    "StepSequence",
    "Sums",
    "WarmUp",
]
