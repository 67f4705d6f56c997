"""Synchronous or asynchronous scheduling, told from where end stamps lie (wire contract §5.6).

FIRST_TOKEN and FINISHED of step s come before ts_start(s + 1) if the engine waits for each step, after it if the next
step is scheduled while s runs. SCHEDULED of s + 1 tells the same where there is no summary.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from online.state import saved

_VOTES_MIN = 8
_SWITCH_SHARE = 0.9
_DECAY = 0.5


class Scheduling(enum.StrEnum):
    """How the engine's busy loop overlaps scheduling and execution."""

    SYNC = "sync"
    ASYNC = "async"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class SchedulingVotes:
    """Decides once there are enough votes, then re-checks with forgetting."""

    STATE = saved("scheduling_votes")

    decided: Scheduling = Scheduling.UNKNOWN
    sync: float = 0.0
    asynchronous: float = 0.0

    def add(self, steps: NDArray[np.void], cells: NDArray[np.void]) -> None:
        """Count the votes of consecutive steps; each step must be given once."""
        sync, asynchronous = votes(steps, cells)
        self.sync += sync
        self.asynchronous += asynchronous
        if self.decided is Scheduling.UNKNOWN:
            self._decide()

    def settle_block(self) -> None:
        """End of a block of steps: re-check, then count what has been less."""
        self._decide()
        if self.decided is Scheduling.UNKNOWN:
            return  # journeys alone cast a vote or two a block: forgetting them would never let them decide
        self.sync, self.asynchronous = _DECAY * self.sync, _DECAY * self.asynchronous

    def provisional(self, steps: NDArray[np.void], cells: NDArray[np.void]) -> Scheduling:
        """The mode as these steps show it, without counting their votes; UNKNOWN while they show too little."""
        sync, asynchronous = votes(steps, cells)
        if sync + asynchronous < _VOTES_MIN:
            return Scheduling.UNKNOWN
        return Scheduling.SYNC if sync >= asynchronous else Scheduling.ASYNC

    def settle(self, steps: NDArray[np.void], cells: NDArray[np.void]) -> Scheduling:
        """End of the stream: decide with whatever there is, else synchronous."""
        sync, asynchronous = votes(steps, cells)
        more_async = asynchronous + self.asynchronous > sync + self.sync
        self.decided = Scheduling.ASYNC if more_async else Scheduling.SYNC
        return self.decided

    def _decide(self) -> None:
        total = self.sync + self.asynchronous
        if total < _VOTES_MIN:
            return
        if self.decided is Scheduling.UNKNOWN:
            self.decided = Scheduling.SYNC if self.sync >= self.asynchronous else Scheduling.ASYNC
        elif self.sync > _SWITCH_SHARE * total:
            self.decided = Scheduling.SYNC
        elif self.asynchronous > _SWITCH_SHARE * total:
            self.decided = Scheduling.ASYNC


def votes(steps: NDArray[np.void], cells: NDArray[np.void]) -> tuple[int, int]:
    """(synchronous, asynchronous) votes of consecutive steps: does an end stamp precede the next step's start?"""
    completed = cells["completed_ns"][:-1]
    by_start = cells["seen"][1:]
    next_ns = np.where(by_start, steps["ts_start_ns"][1:], cells["scheduled_ns"][1:])
    usable = (completed > 0) & (next_ns > 0)
    sync = int(np.count_nonzero(usable & (completed < next_ns)))
    return sync, int(np.count_nonzero(usable)) - sync
