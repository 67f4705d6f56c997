"""Which rows a River model sees: so many per second of event time at most, evenly spaced in each block."""

from __future__ import annotations

import numpy as np

from online.rows import Ints
from online.state import Stateful


class Thinning(Stateful):
    """Of one stream of rows. Not the rows that cross a fixed time: the longer a row, the likelier it is to be one.

    Args:
        rows_per_s: rows seen per second of event time, at most.

    Attributes:
        last_ns: end of the last block; 0 before the first.
        may_see: rows that are left over for the next block; what a second allows at most.
    """

    SAVED = ("last_ns", "may_see")

    __slots__ = ("_rows_per_s", "last_ns", "may_see")

    def __init__(self, rows_per_s: float) -> None:
        self._rows_per_s = rows_per_s
        self.last_ns, self.may_see = 0, 0.0

    def pick(self, end_ns: Ints) -> Ints:
        """Indices of the rows that are seen, of a block of rows that end at these times, (n,), n > 0."""
        n, last_ns = len(end_ns), int(end_ns.max())
        since_ns = self.last_ns or int(end_ns.min())
        spent_s, self.last_ns = max(0.0, (last_ns - since_ns) / 1e9), last_ns
        self.may_see = min(self.may_see + spent_s * self._rows_per_s, max(self._rows_per_s, 1.0))
        k = min(n, int(self.may_see))
        self.may_see -= k
        return (np.arange(k) * n + n // 2) // max(k, 1)
