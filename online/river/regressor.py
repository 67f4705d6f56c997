"""Linear regression over the columns of the corrector by River's SGD and Huber's loss, a row at a time, in blocks.

    w <- w - 0.03 g u     w0 <- w0 - 0.03 g     g: derivative of Huber's loss, threshold 0.05, of d = w . u + w0 - t

The step of row j moves d of every later row i by -0.03 g_j (u_i . u_j + 1): with all products u_i . u_j taken at once a
row costs one subtraction, and the weights take one step by sum g_j u_j, where SGD has taken its steps one by one. Rows
u (n, 11); equal to River's LinearRegression but for rounding (1e-16).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from online.rows import Floats
from online.state import Count, Finite, saved

from .context import CONTEXT

NAMES = (*CONTEXT.names, "day_sin", "day_cos")
_RATE, _THRESHOLD = 0.03, 0.05
_BLOCK_ROWS = 128
"""Products of so many rows with one another are 128 kB."""


class Regressor:
    """Weights and intercept are kept here, so that they can be saved."""

    STATE = saved("regressor", weight=Floats, intercept=Finite, iterations=Count)

    __slots__ = ("_loss", "_optimizer", "intercept", "iterations", "weight")

    def __init__(self) -> None:
        self.weight = np.zeros(len(NAMES))
        self.intercept = 0.0
        self.iterations = 0
        self._optimizer: Any = None
        self._loss: Any = None

    def restored(self) -> None:
        """What is River's is made once it is needed."""
        self._optimizer = self._loss = None

    def learn(self, columns: Floats, target: Floats) -> None:
        """One gradient step per row; columns (n, 11), target (n,)."""
        if self._optimizer is None:
            from river import optim  # noqa: PLC0415 -- only who learns by River's models pays for its import

            self._optimizer, self._loss = optim.SGD(_RATE), optim.losses.Huber(_THRESHOLD)
        for start in range(0, len(target), _BLOCK_ROWS):
            rows = slice(start, start + _BLOCK_ROWS)
            self._learn_block(columns[rows], target[rows])

    def _learn_block(self, columns: Floats, target: Floats) -> None:
        off = columns @ self.weight + (self.intercept - target)
        moved = _RATE * (columns @ columns.T + 1.0)
        gradient = np.empty(len(target))
        for row, moves in enumerate(moved):
            gradient[row] = of_row = self._loss.gradient(0.0, off.item(row))
            off -= moves * of_row
        self.weight = self._optimizer.step(self.weight.copy(), gradient @ columns)
        self.intercept -= _RATE * float(np.add.reduce(gradient))
        self.iterations += len(target)

    @property
    def finite(self) -> bool:
        """Whether it can go on."""
        return bool(np.isfinite(self.weight).all()) and math.isfinite(self.intercept)
