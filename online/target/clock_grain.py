"""Is the clock of the telemetry fine enough for these steps?

A clock that counts in units longer than a step says that many steps take no time. Those rows cannot be learned, and the
others are the longer ones: what is learned of them alone is biased, however surely. What is looked at are the last 4096
to 8192 rows, counted one by one, so that it does not matter in which pieces they come.
"""

from __future__ import annotations

import numpy as np

from online.rows import Floats
from online.snapshot import Reason
from online.state import Stateful

# Derived: from the half-life of coefficients, 4,000 steps.
WINDOW_ROWS = 4096
"""About as many as the coefficients remember."""
# Derived: from start_rows.
ROWS_MIN = 256
"""With fewer nothing may be used in any case."""
# Guess.
SHARE_MAX = 0.05
"""Beyond it the rest is no sample of all steps; two stamps that swapped places are a few in a thousand."""


class ClockGrain(Stateful):
    """Rows of one target, and how many of them seem to take no time: of this window, and of the one before."""

    SAVED = ("rows", "timeless", "rows_before", "timeless_before")

    def __init__(self) -> None:
        self.rows = self.timeless = self.rows_before = self.timeless_before = 0

    def learn(self, elapsed_us: Floats) -> None:
        """The times of rows, those that cannot be learned included, (n,)."""
        start = 0
        while start < len(elapsed_us):
            part = elapsed_us[start : start + WINDOW_ROWS - self.rows]
            start += len(part)
            self.rows += len(part)
            self.timeless += int(np.count_nonzero(part == 0.0))
            if self.rows == WINDOW_ROWS:
                self.rows_before, self.timeless_before = self.rows, self.timeless
                self.rows = self.timeless = 0

    def add(self, other: ClockGrain) -> None:
        """Rows of both, as those of windows that are over."""
        self.rows_before += self.rows + other.rows + other.rows_before
        self.timeless_before += self.timeless + other.timeless + other.timeless_before
        self.rows = self.timeless = 0

    def doubts(self) -> dict[Reason, str]:
        """The clause that says that what is learned is biased by what is left out, where it is."""
        rows, timeless = self.rows + self.rows_before, self.timeless + self.timeless_before
        if rows < ROWS_MIN or timeless <= SHARE_MAX * rows:
            return {}
        clause = f"the clock of its telemetry is too coarse: {timeless / rows:.0%} of its steps seem to take no time"
        return {Reason.CLOCK_GRAIN: clause}
