"""Engines that share a configuration: whether a change of speed is one of most of them, and what each one sent.

    a_i  = log y_i - (log x_i beta - log X_c beta)      time of a row, as if its work were the usual of its cell c
    l_k  = median of a_i - Y_c                          level of engine k, over its last 64 rows
    e'   = e - (u_k - mean u)                           e of a row as if all engines had one speed; u_k: usual e of k

Y_c and X_c are the cells' references as they are now, the same for all: so engines that speak in turns can be compared.
An engine counts with 16 rows, for ten minutes of event time after its last one. Where several count, a change by
a log time ratio g is one only if l_k is beyond g / 2 on its side for more than half of them, and none is a factor of
1.25 from the usual one. An engine that has been silent since then counts as it was. The statistics of each engine's
rows show in which term it differs (online/rls/merging.py).
"""

from __future__ import annotations

import math
from statistics import fmean, median_low
from typing import TYPE_CHECKING

import numpy as np

from .blocks import PREFILL_CELL, Design, median_of
from .constants import APART, ENGINES_MAX, FEW_ROWS, HALF_LIFE_STEPS, IDLE_GAP_NS, NOISE_ROWS
from .rows import Floats, Ints
from .state import Stateful, Tree

if TYPE_CHECKING:
    from .change import Change


class EngineRows(Stateful):
    """What one engine sent, of p columns.

    Attributes:
        last: its last rows, oldest first: cell and a_i, (n, 2).
        last_ns: event time of its last block.
        usual: u_k, which forgets with 4,000 of its rows.
        learned: how many rows are in a (p, p) and b (p,), the statistics A and b of online/moved_term.py.
        learned_ns: event time of the last of them; a row counts half after ten minutes, the same of every engine.
        effective, squares: how many rows that leaves, and sum w y^2 of them.
    """

    SAVED = ("last", "last_ns", "usual", "learned", "learned_ns", "a", "b", "effective", "squares")

    def __init__(self, p: int) -> None:
        self.last, self.last_ns, self.usual = np.empty((0, 2)), 0, 0.0
        self.forget(p)

    def forget(self, p: int) -> None:
        """Drop the statistics."""
        self.learned, self.learned_ns = 0, 0
        self.a, self.b = np.zeros((p, p)), np.zeros(p)
        self.effective = self.squares = 0.0

    def add(self, x: Floats, elapsed_us: Floats, weight: Floats, end_ns: int) -> None:
        """Add rows x (n, p) of these times and weights (n,) to the statistics."""
        left = 0.5 ** (max(end_ns - self.learned_ns, 0) / IDLE_GAP_NS)
        weighted = weight[:, None] * x
        self.a, self.b = left * self.a + weighted.T @ x, left * self.b + weighted.T @ elapsed_us
        self.effective = left * self.effective + len(x)
        self.squares = left * self.squares + float(weight @ np.square(elapsed_us))
        self.learned, self.learned_ns = self.learned + len(x), end_ns

    def variance(self) -> float:
        """Residual variance of a row's relative time in a fit to this engine alone."""
        left = self.squares - float(self.b @ np.linalg.lstsq(self.a, self.b, rcond=None)[0])
        return max(left, 0.0) / max(self.effective - len(self.b), 1.0)

    def level(self, reference: Floats, first_cell: int) -> float:
        """Median log ratio of the last rows to ``reference``, by their cells, from one cell on; 0 without rows."""
        cell, log_y = self.last[self.last[:, 0] >= first_cell].T
        return median_of(log_y - reference[cell.astype(np.int64)]) if len(cell) else 0.0


class Engines(Stateful):
    """The engines of one configuration, by the numbers that rows bear; ``p``: columns of a row.

    Attributes:
        rows: of those that count, or will with more rows.
    """

    def __init__(self, p: int) -> None:
        self._p = p
        self.rows: dict[int, EngineRows] = {}

    def to_state(self) -> Tree:
        """See Stateful."""
        return {str(number): rows.to_state() for number, rows in self.rows.items()}

    def from_state(self, state: Tree) -> None:
        """See Stateful."""
        self.rows = {int(number): EngineRows(self._p) for number in state}
        for number, rows in self.rows.items():
            rows.from_state(state[str(number)])

    def learn(self, engine: Ints, cell: Ints, log_y: Floats, e: Floats, end_ns: int) -> Floats:
        """Learn rows of a block, (n,) each, in order of time; return e', as if all engines had one speed."""
        usual = np.empty_like(e)
        for number in set(engine.tolist()):
            own, rows = engine == number, self.rows.setdefault(number, EngineRows(self._p))
            rows.last = np.vstack((rows.last, np.column_stack((cell, log_y))[own]))[-2 * NOISE_ROWS :]
            rows.last_ns = end_ns
            rows.usual += (median_of(e[own]) - rows.usual) * min(own.sum() / HALF_LIFE_STEPS, 1.0)
            usual[own] = rows.usual
        heard = sorted(self.rows.items(), key=lambda each: each[1].last_ns)[-ENGINES_MAX:]
        self.rows = {number: rows for number, rows in heard if rows.last_ns >= end_ns - IDLE_GAP_NS}
        return e - (usual - fmean(rows.usual for rows in self.rows.values()))

    def add(self, block: Design, elapsed_us: Floats, weight: Floats) -> None:
        """Rows of a block with times and weights (n,), to their engines' statistics."""
        for number in set(block.engine.tolist()):
            own, rows = block.engine == number, self.rows.setdefault(number, EngineRows(self._p))
            rows.last_ns = int(block.end_ns[-1])
            rows.add(block.x[own], elapsed_us[own], weight[own], rows.last_ns)

    def confirm(self, change: Change, reference: Floats) -> bool:
        """Whether most engines show this change, in the rows that it is of, and none differs after it.

        ``reference``: usual log time of each cell, (512,).
        """
        sign, first_cell = math.copysign(1.0, change.log_time_ratio), PREFILL_CELL if change.prefill else 0
        levels = self._levels(reference, first_cell).values()
        showing = sum(sign * level > 0.5 * abs(change.log_time_ratio) for level in levels)
        if 2 * showing <= len(levels):
            return len(levels) < 2  # noqa: PLR2004 -- an engine and another one
        odd = self.outlier(reference, change.sure_ns)
        return odd is None or abs(math.log(odd[1])) <= APART

    def outlier(self, reference: Floats, since_ns: int = 0) -> tuple[int, float] | None:
        """Number of the engine that differs most from the usual one, and the ratio of their times.

        ``reference``: what cells usually take, (512,). None where fewer than two count, of those that sent rows since.
        """
        levels = self._levels(reference, 0, since_ns)
        if len(levels) < 2:  # noqa: PLR2004 -- an engine and another one
            return None
        usual = median_low(levels.values())
        most = max(levels, key=lambda number: abs(levels[number] - usual))
        return most, math.exp(levels[most] - usual)

    def _levels(self, reference: Floats, first_cell: int, since_ns: int = 0) -> dict[int, float]:
        return {
            number: rows.level(reference, first_cell)
            for number, rows in self.rows.items()
            if len(rows.last) >= FEW_ROWS and rows.last_ns >= since_ns
        }
