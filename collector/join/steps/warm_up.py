"""The first rows of an engine process: one-time compilation must not be learned.

The first step after start-up carries 10-21 s of compilation against 25 ms of work (wire contract §9).
The first ``rows_min`` rows are held; among the first three, those longer than 2 s and 20 times the median pace are
dropped, and so is every request that spans one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from online import STEP_FEATURES, RowBlock, median_of
from online.state import saved

_FIRST_ROWS = 3
_LONG_US = 2e6
_LONG_RATIO = 20.0


@dataclass(slots=True)
class WarmUp:
    """Holds rows until the pace of the engine is known, then passes them through."""

    STATE = saved("warm_up")

    rows_min: int
    over: bool = False
    dropped: int = 0
    spans_unix_ns: list[tuple[int, int]] = field(default_factory=list)
    _held: list[RowBlock] = field(default_factory=list)

    def pass_through(self, rows: list[RowBlock], *, flush: bool) -> RowBlock:
        """Rows free to be learned now; none while they are held."""
        if not self.over:
            self._held += rows
            if sum(len(block) for block in self._held) < self.rows_min and not flush:
                rows = []
            else:
                rows, self._held = self._held, []
        block = RowBlock.concatenate(rows) if rows else RowBlock.empty(STEP_FEATURES)
        return block if self.over or not rows else self._judge(block)

    def _judge(self, block: RowBlock) -> RowBlock:
        self.over = True
        if len(block) == 0:
            return block
        pace_us = block.elapsed_us / block.steps
        compiling = (block.elapsed_us > _LONG_US) & (pace_us > _LONG_RATIO * median_of(pace_us))
        compiling[_FIRST_ROWS:] = False
        for end_ns, elapsed_us in zip(block.end_ns[compiling], block.elapsed_us[compiling], strict=True):
            self.spans_unix_ns.append((int(end_ns - elapsed_us * 1e3), int(end_ns)))
        self.dropped = int(np.count_nonzero(compiling))
        return block.take(~compiling)

    def spanned(self, start_unix_ns: int, end_unix_ns: int) -> bool:
        """Whether a request ran through a dropped row."""
        return any(start < end_unix_ns and end > start_unix_ns for start, end in self.spans_unix_ns)
