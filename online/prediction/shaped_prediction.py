"""The published prediction of a step, x beta F(cell): its own error, intervals and mean, and what it was learned from.

    r_i = log(y_i / (x_i beta F_c))         beta, F: as published before row i was learned; c: the row's batch shape
    e_i = r_i - c_i                         c: the correction that stands, 0 where there is none (online/river)
    shaped_error, error: |exp(-r) - 1|, |exp(-e) - 1|, forgotten as every prequential error
    intervals: quantiles of exp(r): readers compute x beta F, and a correction says nothing of later
    mean_factor = sum y / sum (x beta F)    both forgotten with a half-life of 4000 steps: what stalls add

Microseconds; r (n,), beta (p,) without phases. F is the drift monitor's table (online/drift/cells.py).
``seen`` are the lowest and highest value per step of each column, and the cells with a learned row; they only widen.
Guard: sums are finite because every y is at most 1e12. Merging adds, and takes the wider range.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from online.blocks import CELLS, PREFILL_CELL, Design
from online.rows import Floats, Mask
from online.snapshot import SeenSnapshot
from online.state import Finite, saved

from .prediction_intervals import Intervals
from .prequential import PrequentialError, binned

_HALF_OCTAVES, _LAST_OCTAVE = 32, 11
_EXACT, _PADDED = 16, 78  # the last cell of one batch size, and the first of eight per octave
_HALF_LIFE_STEPS = 4000.0
_KEPT = 0.02


class ShapedPrediction:
    """Of one target, by the coefficients of one model of p columns.

    Attributes:
        error: of the corrected x beta F.
        shaped_error, intervals: of x beta F.
        low, high: of each column per step, (p,); without meaning before the first row.
        cells: batch shapes with a learned row, (512,).
        observed_us, predicted_us: decayed sums.
    """

    STATE = saved(
        "shaped_prediction",
        error=PrequentialError,
        shaped_error=PrequentialError,
        intervals=Intervals,
        low=Floats,
        high=Floats,
        cells=Mask,
        observed_us=Finite,
        predicted_us=Finite,
    )

    def __init__(self, p: int) -> None:
        self.error, self.shaped_error = PrequentialError(), PrequentialError()
        self.intervals = Intervals()
        self.low, self.high = np.zeros(p), np.zeros(p)
        self.cells: Mask = np.zeros(CELLS, np.bool_)
        self.observed_us = self.predicted_us = 0.0

    def learn(self, block: Design, log_ratio: Floats | None, corrected: Floats | None = None) -> None:
        """Rows with r (n,), None while nothing was predicted, and exp(c) (n,), None where c = 0."""
        per_step = np.divide(block.x.T, block.steps, order="C")  # (p, n): by columns of n, numpy takes a tenth as long
        low, high = per_step.min(axis=1), per_step.max(axis=1)
        if self.cells.any():
            low, high = np.minimum(low, self.low), np.maximum(high, self.high)
        self.low, self.high = low, high
        self.cells[block.cell] = True
        if log_ratio is None:
            return
        inverse = np.exp(-log_ratio)
        self.intervals.learn(block, log_ratio)
        counts = binned(np.abs(inverse - 1.0))
        self.shaped_error.add_counts(*counts)
        self.error.add_counts(*(counts if corrected is None else binned(np.abs(inverse * corrected - 1.0))))
        kept = 2.0 ** -(float(block.steps @ block.weight) / _HALF_LIFE_STEPS)
        self.observed_us = self.observed_us * kept + float(block.elapsed_us.sum())
        self.predicted_us = self.predicted_us * kept + float(block.elapsed_us @ inverse)

    def forget(self) -> None:
        """A change of speed: what was summed up before is of another machine."""
        self.intervals.forget(_KEPT)
        self.observed_us *= _KEPT
        self.predicted_us *= _KEPT

    def mean_factor(self) -> float | None:
        """Mean time per predicted time; None where nothing was predicted."""
        return self.observed_us / self.predicted_us if self.predicted_us > 0.0 else None

    def seen(self, names: tuple[str, ...]) -> SeenSnapshot | None:
        """Ranges of the columns but the intercept, and names of the cells; None before the first row."""
        if not self.cells.any():
            return None
        ranges = zip(names, self.low.tolist(), self.high.tolist(), strict=True)
        features = {name: (low, high) for name, low, high in ranges if name != "intercept"}
        return SeenSnapshot(features=features, cells=sorted(map(cell_name, np.flatnonzero(self.cells).tolist())))

    def add(self, other: ShapedPrediction) -> None:
        """Add the rows of another record to these."""
        self.error.add(other.error)
        self.shaped_error.add(other.shaped_error)
        self.intervals.add(other.intervals)
        self.observed_us += other.observed_us
        self.predicted_us += other.predicted_us
        if not self.cells.any():
            self.low, self.high = other.low, other.high
        elif other.cells.any():
            self.low, self.high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        self.cells |= other.cells


@functools.cache
def cell_name(cell: int) -> str:
    """``decode:3``, ``decode:17-24``, ``prefill:8-15:64-90`` (requests, then prefill tokens): online/blocks.py."""
    if cell >= PREFILL_CELL:
        octave, half = divmod(cell - PREFILL_CELL, _HALF_OCTAVES)
        tokens = _range(
            math.ceil(2 ** (half / 2)), math.ceil(2 ** ((half + 1) / 2)) - 1, last=half == _HALF_OCTAVES - 1
        )
        # Between 1.41 and 2 tokens there is no whole number, only means of several steps.
        requests = _range(2**octave, 2 ** (octave + 1) - 1, last=octave == _LAST_OCTAVE)
        return f"prefill:{requests}:{'1.5' if half == 1 else tokens}"
    if cell <= _EXACT:
        return f"decode:{cell}"
    if cell < _PADDED:
        return f"decode:{8 * (cell - 14) - 7}-{8 * (cell - 14)}"
    k = cell - _PADDED
    low = 505 if k == 0 else math.ceil(512 * 2 ** (k / 8))
    return f"decode:{_range(low, math.ceil(512 * 2 ** ((k + 1) / 8)) - 1, last=cell == PREFILL_CELL - 1)}"


def _range(low: int, high: int, *, last: bool) -> str:
    return f"{low}+" if last else f"{low}" if low == high else f"{low}-{high}"
