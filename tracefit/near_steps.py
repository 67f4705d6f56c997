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
    step = (a + b x) f + s C

a is what a step with prefill is padded by to whole tiles of t tokens; 0 where nobody said t. Of a cell it is what was
told of it, else (t - 1) / 2; of the step asked for, (-T) mod t of its T tokens, decodes among them, and (t - 1) / 2
where T is no whole number: the mean of requests that differ.

Kinds are with prefill and without. Lines are fitted at half octaves of P and n. Where nobody said s, context stays
inside: y_c = t_c x_c / (x_c + b_C C_c), and C costs as much more as the rest does. Where nobody said what the cells
usually had, x beta F is all there is.

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
from .shapes import token_class

_HALF_ROWS = 8.0
_RATIO_MAX = 5.0
_DRAWN = 0.001
_PER_OCTAVE = -math.log(8.0)
_NODES = 2.0
_NODE_STRIDE = 1024  # more than there are half octaves of any number of tokens
_CELLS_MAX = 512  # there are no more
_TILE_MAX = 1024
_Line = tuple[float, float]
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

    __slots__ = ("_columns", "_near", "_places")

    def __init__(self, cells: list[_Seen]) -> None:
        weights = [each.share / (each.x * each.x) for each in cells]
        x, y = [each.x for each in cells], [each.y for each in cells]
        to_x = list(map(mul, weights, x))
        self._columns = (weights, to_x, list(map(mul, weights, y)), list(map(mul, to_x, x)), list(map(mul, to_x, y)))
        self._places = ([each.requests for each in cells], [each.tokens for each in cells])
        self._near: tuple[dict[int, list[float]], dict[int, list[float]]] = ({}, {})

    def line(self, requests: int, tokens: int) -> _Line:
        """Its a and b around a node."""
        near = list(map(mul, self._nearness(0, requests), self._nearness(1, tokens)))
        total, to_x, to_y, to_xx, to_xy = [sum(map(mul, near, column)) for column in self._columns]
        if not to_x > 0.0:
            return 0.0, 1.0
        drawn = _DRAWN * to_x * to_x / total
        slope = (to_xy - to_x * to_y / total + drawn * to_y / to_x) / (to_xx - to_x * to_x / total + drawn)
        slope = max(slope, 0.0)
        return (to_y - slope * to_x) / total, slope

    def _nearness(self, axis: int, node: int) -> list[float]:
        """8 to the minus octaves of n or P, of each cell."""
        known = self._near[axis].get(node)
        if known is None:
            at = node / _NODES
            known = self._near[axis][node] = [math.exp(_PER_OCTAVE * abs(place - at)) for place in self._places[axis]]
        return known


class NearSteps(ShapeTable):
    """f, p10 and p90 by requests · 64 + class of prefill tokens, and steps by the module's formula."""

    __slots__ = ("_coefficients", "_context_us", "_decodes", "_lines", "_prefills", "_seen", "_tile")

    def __init__(self, target: Target, coefficients: Coefficients) -> None:
        super().__init__(target)
        self._coefficients = coefficients
        self._lines: dict[int, _Line] = {}
        tile = target.tile if 1 < target.tile <= _TILE_MAX else 0
        self._seen = _seen_of(target, coefficients, tile)
        self._tile = tile if self._seen else 0
        self._context_us = target.context_us_per_token if self._seen else None
        self._decodes = _Kind([each for each in self._seen.values() if each.tokens < 0.0])
        self._prefills = _Kind([each for each in self._seen.values() if each.tokens >= 0.0])

    def band(self, prefill_tokens: float, requests: float, decode_context_tokens: float, decodes: float) -> Band:
        """us, low and high of one step; the numbers are trusted. ``decodes``: of its requests those that decode."""
        b0, b_prefill, b_context, b_requests = self._coefficients
        padded = prefill_tokens
        if self._tile and prefill_tokens > 0.0:
            padded += _padding(self._tile, prefill_tokens + decodes)
        x = b0 + b_prefill * padded + b_requests * requests
        factor, p10, p90 = self[STRIDE * round(requests) + token_class(prefill_tokens)]
        rest_us = self._beside(_log2(prefill_tokens), _log2(requests), x) * factor
        if self._context_us is not None:
            us = rest_us + self._context_us * decode_context_tokens
        else:
            us = rest_us + (rest_us / x if x > 0.0 else factor) * b_context * decode_context_tokens
        return us, us * p10, us * p90

    def _factor(self, cell: str) -> float:
        """What the cell asked for knows better."""
        if not self._seen:
            return super()._factor(cell)
        seen = self._seen.get(cell)
        return 1.0 if seen is None else (seen.y / self._beside(seen.tokens, seen.requests, seen.x)) ** seen.share

    def _beside(self, tokens: float, requests: float, x: float) -> float:
        """The line around these log2 of P and n, at x."""
        sizes, classes = round(_NODES * requests), round(_NODES * tokens)
        line = self._lines.get(_NODE_STRIDE * sizes + classes)
        if line is None:
            kind = self._decodes if tokens < 0.0 else self._prefills
            line = self._lines[_NODE_STRIDE * sizes + classes] = kind.line(sizes, classes)
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
            y = us - context_us * context if context_us is not None else us * x / whole
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
