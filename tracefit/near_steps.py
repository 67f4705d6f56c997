"""Steps as those of shapes beside them were: what a batch that was hardly served takes.

What is asked about is often not what was served: its cell has few rows or none, or had other contexts. x beta F knows
one line and a factor for each cell; more is told by the cells beside. With r_c the rows of cell c, P_c, n_c, C_c and
t_c the usual work of a step in it (prefill tokens, requests, tokens of decode context) and its microseconds, and s what
a token of context costs among steps of about one size (b_C, fitted over all steps, stands in for padded batches and
rooflines as far as they come with context):

    x_c  = b0 + bP (P_c + a_c) + bn n_c                     y_c = t_c - s C_c
    v_c  = 8^-d_c r_c / (r_c + 8) / x_c²                    d_c = |log2 n_c / n| + |log2 P_c / P|, of its kind
    y    = a + b x, least squares with weights v_c around (P, n), b drawn to Y = mean y / mean x by 0.001 (mean x)²
    f_c  = (y_c / (a + b x_c))^(r_c / (r_c + 8))            what the cell asked for knows better; 1 without rows
    T_c  = (a + b x) f                                      at the middle of each cell
    step = T + s C                                          T between the middles of the cells around, straight

A step with more work is never faster: T_c need not rise with P and n, for the factors are noisy, so each is put half
way between the highest of the smaller cells and the lowest of the larger ones, itself among both; it stays where all of
them rise. A step with prefill takes at least what the same requests take without.

Where no cell has 64 rows, the coefficients are all there is: T = x and s = b_C; likewise where rows cover many steps
each, for the cell of a mean step says nothing of the steps that it is the mean of.

a is what a step with prefill is padded by to whole tiles of t tokens; 0 where nobody said t. Of a cell it is what was
told of it, else (t - 1) / 2; of the step asked for, (-T) mod t of its T tokens, decodes among them, and (t - 1) / 2
where T is no whole number: the mean of requests that differ.

Kinds are with prefill and without. Lines are fitted at the middle of each cell. Where nobody said s, it is b_C. Where
nobody said what the cells usually had, y_c / x_c is the published factor, and there are no lines.

Microseconds. Guards: r_c >= 1; t <= 1024; b >= 0; a + b x and y_c within a fifth of x and five times x: a cell outside,
such as the one step that compiled, says nothing.

References: Frisch and Waugh, Partial time regressions as compared with individual trends (Econometrica 1933), for s;
Cleveland, Robust locally weighted regression (JASA 1979), without the robust weights, for a and b.
"""

from __future__ import annotations

import math
from itertools import islice
from operator import mul
from typing import NamedTuple

from .document import Target
from .shape_table import STRIDE, Band, ShapeTable
from .shapes import CELL_OCTAVE_MAX, DECODE_FIRST, HALF_OCTAVE_MAX, cell_of_class, token_class
from .surface import Surface

_HALF_ROWS = 8.0
_ROWS_MIN = 64.0
_RATIO_MAX = 5.0
_DRAWN = 0.001
_PER_OCTAVE = -math.log(8.0)
_CELLS_MAX = 512  # there are no more
_TILE_MAX = 1024
_DECODE_END = 2 * DECODE_FIRST[-1]
Coefficients = tuple[float, float, float, float]


class _Seen(NamedTuple):
    """A cell with rows: log2 of n_c and P_c, x_c, y_c, and r / (r + 8)."""

    requests: float
    tokens: float
    x: float
    y: float
    share: float


class _Kind:
    """Cells of one kind by column: where they are, and what each adds to the sums of a line."""

    __slots__ = ("_columns", "_places")

    def __init__(self, cells: list[_Seen]) -> None:
        weights = [each.share / (each.x * each.x) for each in cells]
        x, y = [each.x for each in cells], [each.y for each in cells]
        to_x = list(map(mul, weights, x))
        self._columns = (weights, to_x, list(map(mul, weights, y)), list(map(mul, to_x, x)), list(map(mul, to_x, y)))
        self._places = ([each.requests for each in cells], [each.tokens for each in cells])

    def nearness(self, axis: int, at: float) -> list[float]:
        """8 to the minus octaves of n or P, of each cell."""
        return [math.exp(_PER_OCTAVE * abs(place - at)) for place in self._places[axis]]

    def line(self, of_requests: list[float], of_tokens: list[float]) -> tuple[float, float]:
        """Its a and b around a place that is so near."""
        near = list(map(mul, of_requests, of_tokens))
        total, to_x, to_y, to_xx, to_xy = [sum(map(mul, near, column)) for column in self._columns]
        if not to_x > 0.0:
            return 0.0, 1.0
        drawn = _DRAWN * to_x * to_x / total
        slope = (to_xy - to_x * to_y / total + drawn * to_y / to_x) / (to_xx - to_x * to_x / total + drawn)
        slope = max(slope, 0.0)
        return (to_y - slope * to_x) / total, slope


class NearSteps:
    """Steps by the module's formula."""

    __slots__ = ("_coefficients", "_context_us", "_seen", "_shapes", "_surfaces", "_target", "_tile", "_told")

    def __init__(self, target: Target, coefficients: Coefficients, *, of_means: bool = False) -> None:
        told = not of_means and max(target.factor_rows.values(), default=0.0) >= _ROWS_MIN
        self._coefficients = coefficients
        self._shapes = ShapeTable(target)
        self._target = target
        tile = target.tile if told and 1 < target.tile <= _TILE_MAX else 0
        self._seen = _seen_of(target, coefficients, tile) if told else {}
        self._tile = tile if self._seen else 0
        context_us = target.context_us_per_token if self._seen else None
        self._context_us = coefficients[2] if context_us is None else context_us
        self._told = bool(told and target.factors)
        self._surfaces: tuple[Surface, Surface] | None = None

    def band(self, prefill_tokens: float, requests: float, decode_context_tokens: float, decodes: float) -> Band:
        """us, low and high of one step; the numbers are trusted. ``decodes``: of its requests those that decode."""
        _, p10, p90 = self._shapes[STRIDE * round(requests) + token_class(prefill_tokens)]
        if self._told:
            us = self._rest_us(prefill_tokens, requests, decodes) + self._context_us * decode_context_tokens
        else:
            b0, b_prefill, b_context, b_requests = self._coefficients
            us = b0 + b_prefill * prefill_tokens + b_context * decode_context_tokens + b_requests * requests
        return us, us * p10, us * p90

    def _rest_us(self, prefill_tokens: float, requests: float, decodes: float) -> float:
        """T."""
        if self._surfaces is None:
            self._surfaces = (self._decodes(), self._prefills())
        without, with_prefill = self._surfaces
        least_us = without.at(requests, 0.0)
        if prefill_tokens <= 0.0:
            return least_us
        padded = prefill_tokens
        if self._tile:
            padded += _padding(self._tile, prefill_tokens + decodes)
        us = with_prefill.at(requests, padded)
        return max(least_us, us)

    def _decodes(self) -> Surface:
        """T_c of the cells without prefill."""
        kind = _Kind([each for each in self._seen.values() if each.tokens < 0.0])
        none = kind.nearness(1, -1.0)
        ends = (*DECODE_FIRST[1:], _DECODE_END)
        sizes = [0.5 * (first + end - 1) for first, end in zip(DECODE_FIRST, ends, strict=True)]
        rows = [
            [self._of_cell(cell_of_class(0, first), kind.line(kind.nearness(0, math.log2(size)), none), size, 0.0)]
            for first, size in zip(DECODE_FIRST, sizes, strict=True)
        ]
        return Surface(sizes, [0.0], rows)

    def _prefills(self) -> Surface:
        """T_c of the cells with prefill, by octaves of requests and half octaves of tokens."""
        kind = _Kind([each for each in self._seen.values() if each.tokens >= 0.0])
        halves, octaves = range(HALF_OCTAVE_MAX + 1), range(CELL_OCTAVE_MAX + 1)
        middles = [0.5 * half + 0.25 for half in halves]
        of_tokens = [kind.nearness(1, middle) for middle in middles]
        padding = (self._tile - 1.0) / 2.0 if self._tile else 0.0
        tokens = [2.0**middle + padding for middle in middles]
        sizes = [0.5 * (3 * 2**octave - 1) for octave in octaves]
        rows = []
        for octave, size in zip(octaves, sizes, strict=True):
            of_requests = kind.nearness(0, math.log2(size))
            cells = [cell_of_class(half + 1, float(1 << octave)) for half in halves]
            rows.append(
                [
                    self._of_cell(cell, kind.line(of_requests, near), size, at)
                    for cell, near, at in zip(cells, of_tokens, tokens, strict=True)
                ]
            )
        return Surface(sizes, tokens, rows)

    def _of_cell(self, cell: str, line: tuple[float, float], requests: float, tokens: float) -> float:
        """T_c."""
        b0, b_prefill, _, b_requests = self._coefficients
        x = b0 + b_prefill * tokens + b_requests * requests
        if not self._seen:
            return x * self._target.factors.get(cell, 1.0)
        seen, beside_us = self._seen.get(cell), _on(line, x)
        return beside_us if seen is None else beside_us * (seen.y / _on(line, seen.x)) ** seen.share


def _on(line: tuple[float, float], x: float) -> float:
    """The line at x, within its guards."""
    return min(max(line[0] + line[1] * x, x / _RATIO_MAX), x * _RATIO_MAX)


def _seen_of(target: Target, coefficients: Coefficients, tile: int) -> dict[str, _Seen]:
    """Cells by name; those that say nothing are left out."""
    b0, b_prefill, b_context, b_requests = coefficients
    context_us, seen = target.context_us_per_token, {}
    for cell, (tokens, requests, context, us) in islice(target.usual_work.items(), _CELLS_MAX):
        padding = target.usual_padding.get(cell, (tile - 1.0) / 2.0) if tile and tokens > 0.0 else 0.0
        x = b0 + b_prefill * (tokens + padding) + b_requests * requests
        whole = x + b_context * context
        if x > 0.0 and whole > 0.0:
            y = us - (b_context if context_us is None else context_us) * context
            if x < y * _RATIO_MAX < x * _RATIO_MAX * _RATIO_MAX:
                rows = max(target.factor_rows.get(cell, 0.0), 1.0)
                seen[cell] = _Seen(_log2(requests), _log2(tokens), x, y, rows / (rows + _HALF_ROWS))
    return seen


def _padding(tile: int, tokens: float) -> float:
    """What so many tokens are padded by; a number that is not whole is a mean of several."""
    return float(-int(tokens) % tile) if tokens == int(tokens) else (tile - 1.0) / 2.0


def _log2(number: float) -> float:
    """Of prefill tokens or requests, from 1 on; below zero where there are none."""
    return math.log2(number) if number > 1.0 else 0.0 if number > 0.0 else -1.0
