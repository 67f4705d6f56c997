"""Which rows a River model sees: so many per second of event time at most, whatever the load.

    slot_i = floor(end_i / slot)        slot: 4 s / rows per second        row i opens a slot where slot_i > all before
    row i is seen where one of the 4 rows before it opened a slot

Four at a time, so that most calls of a fast engine are not looked at. Not the row that opens a slot: it is the one
that lies across a fixed time, and the longer a row the likelier it does (the inspection paradox), so that slow steps
would be seen too often. Decided by the rows alone, as blocks are, whatever calls they come in. Only a call whose first
row lies 10 s back or more starts the count anew, so that one clock that was wrong does not end it.
"""

from __future__ import annotations

import numpy as np

from online.rows import Ints
from online.state import Count, saved

_NS_PER_S = 1e9
_TOGETHER = 4
_AFTER = np.arange(1, _TOGETHER + 1)
_BACK_NS = 10_000_000_000


class Thinning:
    """Of one stream of rows.

    Args:
        rows_per_s: rows seen per second of event time, at most.

    Attributes:
        slot: the latest that was opened, -1 before the first.
        left: rows to come that are seen because of it.
    """

    STATE = saved("thinning", slot=int, left=Count)

    __slots__ = ("_slot_ns", "left", "slot")

    def __init__(self, rows_per_s: float) -> None:
        self._slot_ns = max(1, int(_TOGETHER * _NS_PER_S / rows_per_s))
        self.slot = -1
        self.left = 0

    def pick(self, end_ns: Ints) -> Ints:
        """Indices of the rows that are seen, of rows that end at these times, (n,), n > 0."""
        n, slot_ns = len(end_ns), self._slot_ns
        first = int(end_ns[0])
        if first < self.slot * slot_ns - _BACK_NS:
            self.slot = first // slot_ns
        newest = int(end_ns.max()) // slot_ns
        if newest <= self.slot:
            from_before = min(self.left, n)
            self.left -= from_before
            return np.arange(from_before)
        seen = np.zeros(n + _TOGETHER, np.bool_)
        seen[: self.left] = True
        self.left = max(0, self.left - n)
        slots = np.empty(n + 1, np.int64)
        slots[0], slots[1:] = self.slot, end_ns // slot_ns
        latest = np.maximum.accumulate(slots)
        opened = (latest[1:] > latest[:-1]).nonzero()[0]
        seen[opened[:, None] + _AFTER] = True
        self.left = max(0, int(opened[-1]) + 1 + _TOGETHER - n)
        self.slot = newest
        return seen[:n].nonzero()[0]
