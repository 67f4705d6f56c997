"""Shape factor of a mean step, between the cells of mean steps that were seen.

A row that covers many steps lies in the cell of its mean, and the factor of a cell is what its rows took, at their own
mean: at a border it would jump by what a whole cell is off. Between the middles of cells (octaves of n requests, half
octaves of P prefill tokens) it is a weighted mean of the four around:

    x = log2 n - 1/2    y = 2 log2 P - 1/2    cells (i, j), i = floor x, floor x + 1, j = floor y, floor y + 1
    log F = sum v w log F_ij / sum v w        v = (1 - |x - i|) (1 - |y - j|)    w = r / (r + 256), r rows in the cell

so that a cell of few rows, such as those of one cold start, bends its neighbours little. 1 where none of the four was
seen. Guards: n >= 1, P >= 1; classes end where those of cells do.

Reference: locally weighted means with a triangular kernel (Wand and Jones, Kernel Smoothing, 1995).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .document import Target
from .shapes import CELL_OCTAVE_MAX, HALF_OCTAVE_MAX, cell_of_class

_ROWS_HALF = 256.0
_FIRST_REQUESTS, _FIRST_TOKENS = 2.0**0.5, 2.0**0.25  # x and y are 0 there
_STRIDE = 128  # more than there are half octaves of any number of tokens
_Four = tuple[float, float, float, float, float, float, float, float]


class MeanShapes(dict[int, _Four]):
    """w and w log F of the four cells around, by i · 128 + j; looked up by name once."""

    __slots__ = ("_factors", "_rows")

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._factors: Mapping[str, float] = target.factors
        self._rows: Mapping[str, float] = target.factor_rows

    def __missing__(self, key: int) -> _Four:
        i, j = divmod(key, _STRIDE)
        four = (*self._cell(i, j), *self._cell(i, j + 1), *self._cell(i + 1, j), *self._cell(i + 1, j + 1))
        self[key] = four
        return four

    def _cell(self, octave: int, half: int) -> tuple[float, float]:
        cell = cell_of_class(min(half, HALF_OCTAVE_MAX) + 1, float(1 << min(octave, CELL_OCTAVE_MAX)))
        factor = self._factors.get(cell)
        if factor is None:
            return 0.0, 0.0
        rows = max(self._rows.get(cell, 1.0), 0.0)
        weight = rows / (rows + _ROWS_HALF)
        return weight, weight * math.log(factor)

    def factor(self, prefill_tokens: float, requests: float) -> float:
        """F of a mean step with these many prefill tokens and requests."""
        x = math.log2(requests) - 0.5 if requests > _FIRST_REQUESTS else 0.0
        y = 2.0 * math.log2(prefill_tokens) - 0.5 if prefill_tokens > _FIRST_TOKENS else 0.0
        i, j = int(x), int(y)
        w00, f00, w01, f01, w10, f10, w11, f11 = self[i * _STRIDE + j]
        right, up = x - i, y - j
        left, down = 1.0 - right, 1.0 - up
        weight = left * (down * w00 + up * w01) + right * (down * w10 + up * w11)
        if weight <= 0.0:
            return 1.0
        return math.exp((left * (down * f00 + up * f01) + right * (down * f10 + up * f11)) / weight)
