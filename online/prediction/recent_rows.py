"""The last rows that were predicted before they were learned: where a form fails is seen in them, not in their mean.

    [x_i / l_i (p,)    y_i / l_i    (x_i beta F) / l_i]       per step, by beta and F as published before row i

Kept by the block, as float32, so that a row costs next to nothing; shared by copies, because no block is edited. Not
saved: after a restart the next rows are the last.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from online.blocks import Design
from online.rows import Floats

ROWS_MAX = 500


class PredictedRows(NamedTuple):
    """Rows, oldest first, per step: each feature, the time observed and the time predicted (us)."""

    features: dict[str, list[float]]
    observed_us: list[float]
    predicted_us: list[float]


class RecentRows:
    """At most ``ROWS_MAX`` rows of one model, and what is left of the block that the oldest is in."""

    __slots__ = ("_blocks", "_names", "_rows")

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._blocks: deque[np.ndarray[tuple[int, int], np.dtype[np.float32]]] = deque()
        self._rows = 0

    def __deepcopy__(self, memo: object) -> RecentRows:
        """Blocks are never edited: a copy has the same."""
        copied = RecentRows()
        copied._names, copied._blocks, copied._rows = self._names, self._blocks.copy(), self._rows
        return copied

    def learn(self, names: tuple[str, ...], view: Design, log_ratio: Floats) -> None:
        """Rows (n, p) of the columns that are called so, and log(y / (x beta F)), (n,)."""
        if names != self._names:
            self._names, self._rows = names, 0
            self._blocks.clear()
        last = slice(max(0, len(view) - ROWS_MAX), len(view))
        p, steps = len(names), view.steps[last]
        block = np.empty((len(steps), p + 2), np.float32)
        block[:, :p] = view.x[last] / steps[:, None]
        block[:, p] = view.elapsed_us[last] / steps
        block[:, p + 1] = block[:, p] * np.exp(-log_ratio[last])
        self._blocks.append(block)
        self._rows += len(block)
        while self._rows - len(self._blocks[0]) >= ROWS_MAX:
            self._rows -= len(self._blocks.popleft())

    def predicted_rows(self) -> PredictedRows:
        """The rows, to be looked at."""
        if not self._blocks:
            return PredictedRows({}, [], [])
        *features, observed_us, predicted_us = np.concatenate(self._blocks)[-ROWS_MAX:].T.tolist()
        return PredictedRows(dict(zip(self._names, features, strict=True)), observed_us, predicted_us)
