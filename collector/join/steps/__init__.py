"""One engine process: step sequences, their frontier and holes, and the rows they give."""

from __future__ import annotations

from .habits import Habits, Sums
from .raw_features import Cells
from .scheduling import Scheduling, SchedulingVotes
from .sequence import Advance, Sequence
from .warm_up import WarmUp

__all__ = [
    "Advance",
    "Cells",
    "Habits",
    "Scheduling",
    "SchedulingVotes",
    "Sequence",
    "Sums",
    "WarmUp",
]
