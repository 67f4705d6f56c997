"""Steps as those of shapes beside them were: what a batch that was hardly served takes.

What is asked about is often not what was served: its cell has few rows or none, or had other contexts. x beta F knows
one line and a factor for each cell; more is told by the cells beside. With F_c, r_c the published factor of cell c and
its rows, P_c, n_c, C_c the usual work of a step in it (prefill tokens, requests, tokens of decode context), and s what
a token of context costs among steps of about one size (b_C, fitted over all steps, stands in for padded batches and
rooflines as far as they come with context):

    x_c  = b0 + bP P_c + bn n_c                             y_c = F_c^((r_c + 8) / r_c) (x_c + b_C C_c) - s C_c
    v_c  = 8^-d_c r_c / (r_c + 8) / x_c²                    d_c = |log2 n_c / n| + |log2 P_c / P|, of its kind
    y    = a + b x, least squares with weights v_c around (P, n), b drawn to Y = mean y / mean x by 0.001 (mean x)²
    f_c  = (y_c / (a + b x_c))^(r_c / (r_c + 8))            what the cell asked for knows better; 1 without rows
    step = (a + b x) f + s C

The published factor is shrunk by 8 rows, y_c is not. Kinds are with prefill and without. Lines are fitted at quarter
octaves of P and n. Where nobody said s, context stays inside: y_c = F_c^((r_c + 8) / r_c) x_c, and C costs as much more
as the rest does. Where nobody said what the cells usually had, or what their rows are, x beta F is all there is.

Microseconds. Guards: r_c >= 1; b >= 0; a + b x and y_c within a fifth of x and five times x: a cell outside, such as
the one step that compiled, says nothing.

References: Frisch and Waugh, Partial time regressions as compared with individual trends (Econometrica 1933), for s;
Cleveland, Robust locally weighted regression (JASA 1979), without the robust weights, for a and b.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .document import Target
from .shape_table import STRIDE, Band, ShapeTable
from .shapes import token_class

_SHRINK_ROWS = 8.0
_RATIO_MAX = 5.0
_DRAWN = 0.001
_PER_OCTAVE = -math.log(8.0)
_NODES = 4.0
_NODE_STRIDE = 1024  # more than there are quarter octaves of any number of tokens
_Line = tuple[float, float]
Coefficients = tuple[float, float, float, float]


class _Seen(NamedTuple):
    """A cell with rows: log2 of n_c and P_c, x_c, y_c, and r / (r + 8)."""

    requests: float
    tokens: float
    x: float
    y: float
    share: float


class NearSteps(ShapeTable):
    """f, p10 and p90 by requests · 64 + class of prefill tokens, and steps by the module's formula."""

    __slots__ = ("_coefficients", "_context_us", "_decodes", "_lines", "_prefills", "_seen")

    def __init__(self, target: Target, coefficients: Coefficients) -> None:
        super().__init__(target)
        self._coefficients = coefficients
        self._lines: dict[int, _Line] = {}
        self._seen = _seen_of(target, coefficients)
        self._context_us = target.context_us_per_token if self._seen else None
        self._decodes = [each for each in self._seen.values() if each.tokens < 0.0]
        self._prefills = [each for each in self._seen.values() if each.tokens >= 0.0]

    def band(self, prefill_tokens: float, requests: float, decode_context_tokens: float) -> Band:
        """us, low and high of one step; the numbers are trusted."""
        b0, b_prefill, b_context, b_requests = self._coefficients
        x = b0 + b_prefill * prefill_tokens + b_requests * requests
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
        node = _NODE_STRIDE * round(_NODES * requests) + round(_NODES * tokens)
        line = self._lines.get(node)
        if line is None:
            line = self._lines[node] = self._line(round(_NODES * tokens) / _NODES, round(_NODES * requests) / _NODES)
        return min(max(line[0] + line[1] * x, x / _RATIO_MAX), x * _RATIO_MAX)

    def _line(self, tokens: float, requests: float) -> _Line:
        """Its a and b."""
        total = to_x = to_y = to_xx = to_xy = 0.0
        for seen in self._decodes if tokens < 0.0 else self._prefills:
            octaves = abs(seen.requests - requests) + abs(seen.tokens - tokens)
            weight = math.exp(_PER_OCTAVE * octaves) * seen.share / (seen.x * seen.x)
            total += weight
            to_x += weight * seen.x
            to_y += weight * seen.y
            to_xx += weight * seen.x * seen.x
            to_xy += weight * seen.x * seen.y
        if not to_x > 0.0:
            return 0.0, 1.0
        drawn = _DRAWN * to_x * to_x / total
        slope = (to_xy - to_x * to_y / total + drawn * to_y / to_x) / (to_xx - to_x * to_x / total + drawn)
        slope = max(slope, 0.0)
        return (to_y - slope * to_x) / total, slope


def _seen_of(target: Target, coefficients: Coefficients) -> dict[str, _Seen]:
    """Cells by name; those that say nothing are left out."""
    b0, b_prefill, b_context, b_requests = coefficients
    context_us, seen = target.context_us_per_token, {}
    for cell, work in target.usual_work.items():
        x = b0 + b_prefill * work.prefill_tokens + b_requests * work.requests
        rows = max(target.factor_rows.get(cell, 0.0), 1.0)
        log_usual = math.log(target.factors[cell]) * (rows + _SHRINK_ROWS) / rows
        if abs(log_usual) > math.log(_RATIO_MAX):
            continue
        y = math.exp(log_usual) * x
        if context_us is not None:
            y += (math.exp(log_usual) * b_context - context_us) * work.decode_context_tokens
        if 0.0 < x / _RATIO_MAX < y < x * _RATIO_MAX:
            share = rows / (rows + _SHRINK_ROWS)
            seen[cell] = _Seen(_log2(work.requests), _log2(work.prefill_tokens), x, y, share)
    return seen


def _log2(number: float) -> float:
    """Of prefill tokens or requests, from 1 on; below zero where there are none."""
    return math.log2(number) if number > 1.0 else 0.0 if number > 0.0 else -1.0
