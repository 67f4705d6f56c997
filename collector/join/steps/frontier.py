"""How far the rows of a step sequence have come.

Steps are passed in blocks (step ids divisible by the block's length), because what a block teaches comes into force at
its end. Three step numbers say where the next block and its rows begin:

    emitted_to   boundary at which the newest row ends, and the next one begins; 0 before the first stamped boundary
    learned_to   one past the last step of the newest block that was passed; the habits have learned from all below
    next_step    first step of the next block: learned_to, or the window's first step if that has moved on

Invariant, whenever the sequence has advanced: emitted_to = 0 or base <= emitted_to < learned_to <= next_step, with
``base`` the window's first step (tests/collector/join/steps/test_frontier.py). Rows lag behind blocks: a block whose
last boundaries are not stamped leaves them to the row of a later one.
"""

from __future__ import annotations

from dataclasses import dataclass

from online.state import saved


@dataclass(slots=True)
class Frontier:
    """See the module's docstring."""

    STATE = saved("frontier")

    emitted_to: int = 0
    learned_to: int = 0

    def first_boundary(self, base: int) -> int:
        """Where the next row begins, if it is stamped."""
        return self.emitted_to or base

    def next_step(self, base: int) -> int:
        """First step of the next block."""
        return max(base, self.learned_to)

    def give_up_before(self, base: int) -> bool:
        """The window has left the frontier behind: rows begin anew at ``base``; whether any were lost."""
        lost = 0 < self.emitted_to < base
        if lost:
            self.emitted_to, self.learned_to = 0, base
        return lost
