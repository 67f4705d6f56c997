"""The last rows that were predicted before they were learned: where a form fails is seen in them, not in their mean.

    x_i / l_i (p,)    y_i / l_i    (x_i beta F) / l_i         per step, by beta and F as published before row i

Kept by the block, so that a row costs next to nothing, and shared by copies, because no block is edited. Not saved:
after a restart the next rows are the last.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from online.blocks import Design
from online.rows import Floats

ROWS_MAX = 500


class _Block(NamedTuple):
    x: Floats
    steps: Floats
    elapsed_us: Floats
    log_ratio: Floats


class PredictedRows(NamedTuple):
    """Rows, oldest first, per step: each feature, the time observed and the time predicted (us)."""

    features: dict[str, list[float]]
    observed_us: list[float]
    predicted_us: list[float]


class RecentRows:
    """At most ``ROWS_MAX`` rows of one model, and what is left of the block that the oldest is in."""

    __slots__ = ("_blocks", "_rows")

    def __init__(self) -> None:
        self._blocks: deque[_Block] = deque()
        self._rows = 0

    def __deepcopy__(self, memo: object) -> RecentRows:
        """Blocks are never edited: a copy has the same."""
        copied = RecentRows()
        copied._blocks, copied._rows = self._blocks.copy(), self._rows
        return copied

    def learn(self, view: Design, log_ratio: Floats) -> None:
        """Rows (n, p) and log(y / (x beta F)), (n,)."""
        last = slice(max(0, len(view) - ROWS_MAX), len(view))
        self._blocks.append(_Block(view.x[last].copy(), view.steps[last], view.elapsed_us[last], log_ratio[last]))
        self._rows += last.stop - last.start
        while self._rows - len(self._blocks[0].steps) >= ROWS_MAX:
            self._rows -= len(self._blocks.popleft().steps)

    def predicted_rows(self, names: tuple[str, ...]) -> PredictedRows:
        """The rows, whose columns are called so."""
        if not self._blocks:
            return PredictedRows({name: [] for name in names}, [], [])
        x, steps, elapsed_us, log_ratio = (
            np.concatenate(column)[-ROWS_MAX:] for column in zip(*self._blocks, strict=True)
        )
        observed_us = elapsed_us / steps
        features = dict(zip(names, (x / steps[:, None]).T.tolist(), strict=True))
        predicted_us = observed_us * np.exp(-log_ratio)
        return PredictedRows(features, observed_us.tolist(), predicted_us.tolist())
