"""A surface that rises with both of its coordinates, straight between the nodes of a grid.

    z_ij = (highest of all z_kl with k <= i, l <= j  +  lowest of all z_kl with k >= i, l >= j) / 2
    z    = c0 + c1 u + c2 v + c3 u v            through the four nodes around; beyond the last ones as between them

Both envelopes rise, so their mean does; it is what was given where that rises already. A grid may have one column.

Reference: Robertson, Wright and Dykstra, Order Restricted Statistical Inference (1988), for isotonic envelopes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

_Rows = list[list[float]]


class Surface:
    """z by u (rows) and v (columns), both in growing order."""

    __slots__ = ("_columns", "_patches", "_rows")

    def __init__(self, rows: Sequence[float], columns: Sequence[float], z: _Rows) -> None:
        rising = _rising(z)
        self._rows, self._columns = rows[1:-1], columns[1:-1]
        self._patches = [
            [
                _patch(rows[i : i + 2], columns[j : j + 2], [row[j : j + 2] for row in rising[i : i + 2]])
                for j in range(max(len(columns) - 1, 1))
            ]
            for i in range(len(rows) - 1)
        ]

    def at(self, u: float, v: float) -> float:
        """z; what is not a number is nowhere."""
        patch = self._patches[bisect_right(self._rows, u)][bisect_right(self._columns, v)]
        c0, c1, c2, c3 = patch
        return c0 + c1 * u + (c2 + c3 * u) * v


def _rising(z: _Rows) -> _Rows:
    """Half way between both envelopes."""
    below = _envelope(z, max)
    above = _envelope([row[::-1] for row in z[::-1]], min)
    return [
        [0.5 * (low + high) for low, high in zip(b, a[::-1], strict=True)]
        for b, a in zip(below, above[::-1], strict=True)
    ]


def _envelope(z: _Rows, best: Callable[[float, float], float]) -> _Rows:
    """The best so far in both directions."""
    found: _Rows = []
    for row in z:
        line: list[float] = []
        for j, value in enumerate(row):
            so_far = best(value, line[-1]) if line else value
            line.append(best(so_far, found[-1][j]) if found else so_far)
        found.append(line)
    return found


def _patch(u: Sequence[float], v: Sequence[float], z: _Rows) -> tuple[float, float, float, float]:
    """c0 to c3 through four nodes, or through two where there is one column."""
    per_u = 1.0 / (u[1] - u[0])
    if len(v) == 1:
        slope = (z[1][0] - z[0][0]) * per_u
        return z[0][0] - slope * u[0], slope, 0.0, 0.0
    per_v = 1.0 / (v[1] - v[0])
    slopes = [(row[1] - row[0]) * per_v for row in z]
    bases = [row[0] - slope * v[0] for row, slope in zip(z, slopes, strict=True)]
    c1, c3 = (bases[1] - bases[0]) * per_u, (slopes[1] - slopes[0]) * per_u
    return bases[0] - c1 * u[0], c1, slopes[0] - c3 * u[0], c3
