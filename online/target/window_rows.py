"""The last rows of a target that is learned from windows between scrapes alone: what its error bars rest on.

As soon as a row tells of single steps or requests, these are forgotten for good, and the learner's own error bars hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from online.blocks import Design
from online.rls import JACKKNIFE_ROWS
from online.state import Stateful, Tree


@dataclass
class WindowRows(Stateful):
    """At most 512 rows (``JACKKNIFE_ROWS``), with the columns of all sets."""

    SAVED = ("finer",)

    rows: Design | None = None
    finer: bool = False

    def to_state(self) -> Tree:
        """See Stateful."""
        return super().to_state() | {"rows": None if self.rows is None else self.rows.to_state()}

    def from_state(self, state: Tree) -> None:
        """See Stateful."""
        super().from_state(state)
        self.rows = None if state["rows"] is None else Design.of_state(state["rows"])

    def learn(self, design: Design, *, windows: bool) -> None:
        """Remember rows, or that there are finer ones."""
        if self.finer:
            return
        if not windows:
            self.rows, self.finer = None, True
            return
        rows = design if self.rows is None else Design.concatenate([self.rows, design])
        self.rows = rows.slice(max(0, len(rows) - JACKKNIFE_ROWS), len(rows))

    def add(self, other: WindowRows, *, other_is_later: bool) -> None:
        """Rows of both, the later ones last."""
        self.finer |= other.finer
        parts = [self.rows, other.rows] if other_is_later else [other.rows, self.rows]
        held = [part for part in parts if part is not None]
        self.rows = None
        if held and not self.finer:
            rows = Design.concatenate(held)
            self.rows = rows.slice(max(0, len(rows) - JACKKNIFE_ROWS), len(rows))

    def widen(self, columns: int) -> None:
        """Give the rows more columns, which they do not know: NaN."""
        if self.rows is not None:
            self.rows = self.rows.widened(columns)
