"""Do the engines of a configuration agree? A change of speed is one of all of them, and they must say so.

    a_i  = log y_i - (log x_i beta - log X_c beta)      time of a row, as if its work were the usual of its cell c
    l_k  = median of a_i - Y_c                          level of engine k, over its last 64 rows
    d_k  = l_k - median of the others' l                how much longer it takes than the others, as a log ratio

Y_c and X_c are the cells' references (online/shapes.py), the same for all, as they are now: so engines that speak in
turns can be compared. An engine counts with 16 rows, for ten minutes of event time after its last one. Where several
count, a change by a log gain g is one only if

    no d_k is beyond log 1.25, and for more than half of them l_k is beyond g / 2 on its side.

Two engines that are a factor of 1.25 apart leave no coefficients that are within a tenth of both. With one engine
nothing is asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from online.blocks import CELLS, median_of
from online.rows import Floats, Ints
from online.state import StateError, Stateful, Tree

APART = math.log(1.25)
# Guess: enough for a median, few enough to follow an engine.
ROWS, ROWS_MIN = 64, 16
# Guess: ten minutes.
LATELY_NS = 600_000_000_000
"""The half-life of coefficients: of an engine that has been silent for longer, others have the larger part in them."""
# Guard: memory.
ENGINES_MAX = 256
"""Of one configuration; those heard of longest ago are not compared."""


class OddEngine(NamedTuple):
    """The engine that differs most, by its number, and its time per time of the others."""

    number: int
    ratio: float


@dataclass(slots=True)
class EngineRows(Stateful):
    """The last rows of one engine: cell and a_i of each, oldest first, and the event time of its last block."""

    SAVED = ("cell", "log_y", "last_ns")

    cell: list[int] = field(default_factory=list)
    log_y: list[float] = field(default_factory=list)
    last_ns: int = 0

    def restored(self) -> None:
        """Each row is of a cell."""
        cells = all(type(cell) is int and 0 <= cell < CELLS for cell in self.cell)
        if not cells or len(self.cell) != len(self.log_y):
            raise StateError("rows of an engine without their cells")

    def learn(self, cell: Ints, log_y: Floats, end_ns: int) -> None:
        """Rows (n,) in order of time."""
        self.cell = [*self.cell, *cell[-ROWS:].tolist()][-ROWS:]
        self.log_y = [*self.log_y, *log_y[-ROWS:].tolist()][-ROWS:]
        self.last_ns = end_ns

    def level(self, usual: Floats, first_cell: int) -> float | None:
        """Median beside what their cells usually take, (512,), of cells from one on; None of too few rows."""
        if len(self.cell) < ROWS_MIN:
            return None
        off = [y - usual[c] for c, y in zip(self.cell, self.log_y, strict=True) if c >= first_cell]
        return median_of(off) if off else 0.0


class Engines(Stateful):
    """See the module's docstring; by the numbers that rows bear.

    Attributes:
        rows: of those that count, or will with more rows.
    """

    def __init__(self) -> None:
        self.rows: dict[int, EngineRows] = {}

    def to_state(self) -> Tree:
        """See Stateful."""
        return {str(number): rows.to_state() for number, rows in self.rows.items()}

    def from_state(self, state: Tree) -> None:
        """See Stateful."""
        self.rows = {int(number): EngineRows() for number in state}
        for number, rows in self.rows.items():
            rows.from_state(state[str(number)])

    def learn(self, engine: Ints, cell: Ints, log_y: Floats, end_ns: int) -> None:
        """Rows of a block, (n,) each, in order of time."""
        numbers = np.unique(engine).tolist()
        for number in numbers:
            own = slice(None) if len(numbers) == 1 else engine == number
            self.rows.setdefault(number, EngineRows()).learn(cell[own], log_y[own], end_ns)
        if len(self.rows) > 1:
            kept = sorted(self.rows, key=lambda number: self.rows[number].last_ns)[-ENGINES_MAX:]
            self.rows = {
                number: rows
                for number, rows in self.rows.items()
                if number in kept and rows.last_ns >= end_ns - LATELY_NS
            }

    def odd(self, usual: Floats) -> OddEngine | None:
        """The one that differs most, by what cells usually take, (512,); None where fewer than two count."""
        levels = self._levels(usual, 0)
        if len(levels) < 2:  # noqa: PLR2004 -- an engine and another one
            return None
        beside = {
            number: level - median_of([other for each, other in levels.items() if each != number])
            for number, level in levels.items()
        }
        number = max(beside, key=lambda each: (abs(beside[each]), beside[each]))
        return OddEngine(number, math.exp(beside[number]))

    def confirm(self, gain: float, usual: Floats, first_cell: int = 0) -> bool:
        """Whether a change by this log gain, of cells from one on, is one of most of them and leaves them alike."""
        odd = self.odd(usual)
        if odd is None:
            return True
        sign, levels = math.copysign(1.0, gain), self._levels(usual, first_cell).values()
        showing = sum(sign * level > 0.5 * abs(gain) for level in levels)
        return not differs(odd) and 2 * showing > len(levels)

    def _levels(self, usual: Floats, first_cell: int) -> dict[int, float]:
        levels = {number: rows.level(usual, first_cell) for number, rows in self.rows.items()}
        return {number: level for number, level in levels.items() if level is not None}


def differs(odd: OddEngine) -> bool:
    """Whether it is so far from the others that one set of coefficients cannot do for all."""
    return abs(math.log(odd.ratio)) > APART
