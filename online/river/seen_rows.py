"""Rows that the corrector sees, with their context, from when they come until they are learned.

    place (k,): of each among the rows that wait, ascending        context (k, 9): online/river/context.py

Only these have a context and are corrected, so that what the corrector costs does not grow with the load.
"""

from __future__ import annotations

import numpy as np

from online.rows import Floats, Ints, Mask
from online.state import Array, StateError, saved

from .context import CONTEXT


class SeenRows:
    """See the module's docstring."""

    STATE = saved(
        "seen_rows", place=Array(np.dtype(np.int64)), context=Array(np.dtype(np.float64), columns=len(CONTEXT))
    )

    __slots__ = ("context", "place")

    def __init__(self, place: Ints, context: Floats) -> None:
        self.place, self.context = place, context

    @staticmethod
    def none() -> SeenRows:
        """No rows."""
        return SeenRows(np.empty(0, np.int64), np.empty((0, len(CONTEXT))))

    def restored(self) -> None:
        """Places are in order."""
        if len(self.place) != len(self.context) or (np.diff(self.place, prepend=-1) < 1).any():
            raise StateError("places that are not in order")

    def __len__(self) -> int:
        """Number of rows k."""
        return len(self.place)

    def add(self, place: Ints, context: Floats) -> None:
        """Rows that come after these."""
        self.place = np.concatenate([self.place, place])
        self.context = np.concatenate([self.context, context])

    def take(self, rows: int) -> SeenRows:
        """Those of the first so many rows, which wait no longer."""
        k = int(self.place.searchsorted(rows))
        taken = SeenRows(self.place[:k], self.context[:k])
        self.place, self.context = self.place[k:] - rows, self.context[k:]
        return taken

    def among(self, known: Mask) -> SeenRows:
        """Those that are known, by their place among the rows that are; known (n,)."""
        here = known[self.place]
        return SeenRows((known.cumsum() - 1)[self.place[here]], self.context[here])
