"""What a step of any batch shape takes: the names of shapes, and one surface through what was seen of them.

A step is described by its prefill tokens P, its requests n and its tokens of decode context C. Two partitions of
(P, n) exist, both by integers only.

**Stratum**, for intervals. o = floor(log2 n), 0 to 15 (n < 1 counts as 1):

    decode:LOW-HIGH   P = 0        prefill:LOW-HIGH   P > 0        LOW = 2^o, HIGH = 2^(o+1) - 1, one number if equal

**Cell**, finer, for shape factors. Without prefill, by n rounded to an integer (half to even):

    n <= 16            decode:n                       every batch size is a kernel of its own
    17 <= n <= 512     decode:LOW-HIGH                eights: 17-24, 25-32, …, 505-512 (the last reaches to 558, below)
    n > 512            decode:LOW-HIGH                eight per octave: LOW = ceil(512 · 2^(k/8)), k >= 1

With prefill, by the octave of n (at most 11) and the half octave of P, k = floor(2 log2 P), at most 31:

    prefill:LOW-HIGH:TLOW-THIGH                       TLOW = ceil(2^(k/2)), THIGH = ceil(2^((k+1)/2)) - 1

k = 1 holds no whole number, only means of several steps; its THIGH is below its TLOW, and it is named 1.5. The first
class of several octaves (n beyond 512) begins at 559; 505 to 558 are one cell and it is named 505-558. The last class
of each kind has no end and is named LOW+.

**Surface.** r_c rows of cell c were seen; P_c, n_c, C_c are the usual work of its steps, t_c their microseconds; s is
what a token of context costs among steps of about one size, b_C where nobody said. Cells with prefill and cells without
it are two kinds. At the middle (P, n) of every cell of a kind, seen or not:

    x    = b0 + bP P + bn n + be (1 - (1 - k/E)^(P + n))    x_c the same of P_c, n_c        y_c = t_c - s C_c
    v_c  = 8^-d_c r_c / (r_c + 8) / x_c²                    d_c = |log2 n_c / n| + |log2 P_c / P|
    y    = a + b x, least squares with weights v_c, b drawn to Y = mean y / mean x by 0.001 (mean x)²
    T    = (a + b x) (y_c / (a + b x_c))^(r_c / (r_c + 8))  what the cell itself knows; the power is 1 without rows

    step = T(P, n) + s C                                    T between the middles around: straight in P and in n

and at least what the same requests take without prefill. Where nobody said what the cells usually had, T = x F with the
published factor. Where a row is the mean of many steps, only one without prefill has the shape of the steps in it, and
with prefill T = x. Where no cell has 64 rows, or of means all cells have fewer, the coefficients are all there is:
T = x, s = b_C.

**Rising.** Requests are asked about by a surface that does not fall with P or n, though measured steps may: its T at
the middles are fitted to those above by isotonic regression, along P and then along n (which keeps the order along P,
because the regression of larger values is larger). A band holds what was measured of its number of requests, too.

Some kernels are faster for more requests, as for multiples of four. So without prefill a fall stays, where at least 64
rows of that cell tell it and it is above (p90 / p10)² of its stratum, twice what steps scatter, and above 5 %.

be is of a mixture of E experts, k of which each token goes through; 0 where nobody said.

Microseconds. Guards: r_c >= 1; b >= 0; a + b x and y_c within a fifth of x and five times x: a cell outside, such as
the one step that compiled, says nothing; beyond the last middles no T falls.

References: Frisch and Waugh, Partial time regressions as compared with individual trends (Econometrica 1933), for s;
Cleveland, Robust locally weighted regression (JASA 1979), without the robust weights, for a and b; Robertson, Wright
and Dykstra, Order Restricted Statistical Inference (1988), for isotonic regression.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import islice, repeat
from operator import mul
from typing import NamedTuple

from .document import Interval, Target

STRIDE = 64
"""More than there are pieces of prefill tokens."""
Piece = tuple[float, float, float, float, float]

_STRATUM_OCTAVE_MAX = 15
_HALF_ROWS = 8.0
_ROWS_MIN = 64.0
_RATIO_MAX = 5.0
_DRAWN = 0.001
_FALL_MIN = 1.05
"""Less may be of contexts, whose price is nearly known."""
_PER_OCTAVE = -math.log(8.0)
_CELLS_MAX = 512  # there are no more
_ENTRIES_MAX = 65536

_DECODE_FIRST = (*range(1, 17), *range(17, 512, 8), *(math.ceil(512 * 2 ** (k / 8)) for k in range(1, 50)))
_DECODE_ENDS = (*_DECODE_FIRST[1:], 2 * _DECODE_FIRST[-1])
_OCTAVES, _HALVES = range(12), range(32)
_DECODE_SIZES = [0.5 * (first + end - 1) for first, end in zip(_DECODE_FIRST, _DECODE_ENDS, strict=True)]
_SIZES = [0.5 * (3 * 2**octave - 1) for octave in _OCTAVES]
_TOKENS = [2.0 ** (0.5 * half + 0.25) for half in _HALVES]
"""Middles of the cells: requests of those without prefill; requests and prefill tokens of those with prefill."""


class Coefficients(NamedTuple):
    """Microseconds of ``portable``; ``missed`` is 1 - k/E, the share of experts that one token leaves alone."""

    intercept: float
    prefill_token: float
    context_token: float
    request: float
    experts: float = 0.0
    missed: float = 0.0

    def work(self, prefill_tokens: float, requests: float, decode_context_tokens: float) -> tuple[float, ...]:
        """What a step has of each: of 1, prefill tokens, context, requests, and the share of experts touched."""
        touched = 1.0 - self.missed ** (prefill_tokens + requests)
        return 1.0, prefill_tokens, decode_context_tokens, requests, touched

    def terms(self, prefill_tokens: float, requests: float, decode_context_tokens: float) -> list[float]:
        """What each of them costs."""
        return list(map(mul, self, self.work(prefill_tokens, requests, decode_context_tokens)))

    def us(self, prefill_tokens: float, requests: float) -> float:
        """x: the step without its context."""
        line = self.intercept + self.prefill_token * prefill_tokens + self.request * requests
        return line + self.experts * (1.0 - self.missed ** (prefill_tokens + requests)) if self.experts else line


def stratum_name(prefill_tokens: float, requests: float) -> str:
    """Name of the stratum of a step, as intervals are published by.

    >>> stratum_name(0, 5), stratum_name(300, 20)
    ('decode:4-7', 'prefill:16-31')
    """
    octave = min(max(int(requests).bit_length() - 1, 0), _STRATUM_OCTAVE_MAX)
    return f"{'prefill' if prefill_tokens > 0 else 'decode'}:{_range(2**octave, 2 ** (octave + 1) - 1)}"


def stratum_of_cell(cell: str) -> str:
    """The stratum that a cell's smallest step lies in: ``prefill:16-31`` for ``prefill:16-31:256-362``."""
    kind, _, classes = cell.partition(":")
    low = classes.partition(":")[0].partition("-")[0].rstrip("+")
    return stratum_name(float(kind != "decode"), float(low) if low.isdigit() else 1.0)


def _cell_names() -> tuple[list[str], list[list[str]]]:
    """Of the cells without prefill, and of those with it by octaves of requests and half octaves of tokens."""
    tokens = [_range(math.ceil(2 ** (half / 2)), math.ceil(2 ** ((half + 1) / 2)) - 1) for half in _HALVES]
    tokens[1], tokens[-1] = "1.5", f"{tokens[-1].partition('-')[0]}+"
    sizes = [_range(2**octave, 2 ** (octave + 1) - 1) for octave in _OCTAVES]
    sizes[-1] = f"{sizes[-1].partition('-')[0]}+"
    decodes = [f"decode:{_range(*ends)}" for ends in zip(_DECODE_FIRST, (n - 1 for n in _DECODE_ENDS), strict=True)]
    decodes[-1] = f"decode:{_DECODE_FIRST[-1]}+"
    return decodes, [[f"prefill:{size}:{each}" for each in tokens] for size in sizes]


def _range(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low}-{high}"


def piece_of(prefill_tokens: float) -> int:
    """0 without prefill, else between which two middles the tokens lie, from 1 on; beyond the last as between them."""
    return bisect_right(_TOKENS, prefill_tokens, 1, len(_TOKENS) - 1) if prefill_tokens > 0.0 else 0


class Nodes(NamedTuple):
    """T at the middles of cells: without prefill by requests; with prefill by requests (rows) and tokens (columns)."""

    decodes: list[float]
    prefills: list[list[float]]

    def rising(self, falls: Sequence[float]) -> Nodes:
        """The nearest that do not fall, but by more than ``falls`` from one number of decodes to the next."""
        along_tokens = list(map(_isotonic, self.prefills))
        along_requests = map(_isotonic, zip(*along_tokens, strict=True))
        return Nodes(_isotonic(self.decodes, falls), [list(row) for row in zip(*along_requests, strict=True)])


class StepTable(dict[int, Piece]):
    """Steps of whole numbers of requests: T = max(least, base + per_token P) and p10, p90 of their stratum.

    By requests · 64 + ``piece_of`` the prefill tokens; each is made when it is first asked for, so many are kept.
    """

    __slots__ = ("_measured", "_nodes", "_pooled", "_strata", "_wider")

    def __init__(
        self,
        nodes: Nodes,
        measured: Nodes,
        interval: Interval | None,
        wider: float,
    ) -> None:
        super().__init__()
        self._wider = wider
        self._nodes, self._measured = nodes, measured
        self._pooled = (1.0, 1.0) if interval is None else interval.pooled
        self._strata = {} if interval is None else interval.strata

    def __missing__(self, key: int) -> Piece:
        requests, piece = divmod(key, STRIDE)
        if len(self) >= _ENTRIES_MAX:
            self.clear()
        p10, p90 = self._strata.get(stratum_name(piece, requests), self._pooled)
        low, high = max(min(p10, 1.0) - self._wider, 0.0), max(p90, 1.0) + self._wider
        line = self._line(requests, piece)
        if self._measured is not self._nodes:
            off = _decode(self._measured, requests) / line[0]
            low, high = low * min(off, 1.0), high * max(off, 1.0)
        self[key] = made = (*line, low, high)
        return made

    def _line(self, requests: int, piece: int) -> tuple[float, float, float]:
        """least, base and per_token."""
        least, prefills = _decode(self._nodes, requests), self._nodes.prefills
        if not piece:
            return least, least, 0.0
        size = max(requests, 1.0)
        after = bisect_right(_SIZES, size, 1, len(prefills) - 1)
        low, high = (_between(_SIZES, [row[column] for row in prefills], after, size) for column in (piece - 1, piece))
        per_token = (high - low) / (_TOKENS[piece] - _TOKENS[piece - 1])
        return least, low - per_token * _TOKENS[piece - 1], per_token


def _decode(nodes: Nodes, requests: int) -> float:
    """T of so many requests without prefill."""
    size = max(requests, 1.0)
    after = bisect_right(_DECODE_SIZES, size, 1, len(nodes.decodes) - 1)
    return _between(_DECODE_SIZES, nodes.decodes, after, size)


def _between(places: Sequence[float], values: Sequence[float], after: int, at: float) -> float:
    """The line through the values at ``after`` and before it."""
    share = (at - places[after - 1]) / (places[after] - places[after - 1])
    return values[after - 1] + share * (values[after] - values[after - 1])


def _isotonic(values: Sequence[float], falls: Iterable[float] = repeat(math.inf)) -> list[float]:
    """The nearest in least squares whose neighbours do not fall: they are pooled, unless by more than the factor."""
    pools: list[tuple[float, int]] = []
    for value, fall in zip(values, falls, strict=False):
        mean, count = value, 1
        while pools and mean < pools[-1][0] <= mean * fall:
            before, many = pools.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


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

    def line(self, near: list[float]) -> tuple[float, float]:
        """Its a and b around a place that is so near to each cell."""
        total, to_x, to_y, to_xx, to_xy = [sum(map(mul, near, column)) for column in self._columns]
        if not to_x > 0.0:
            return 0.0, 1.0
        drawn = _DRAWN * to_x * to_x / total
        slope = (to_xy - to_x * to_y / total + drawn * to_y / to_x) / (to_xx - to_x * to_x / total + drawn)
        slope = max(slope, 0.0)
        return (to_y - slope * to_x) / total, slope


class StepSurface:
    """The surface of one configuration by the module's formulas.

    Attributes:
        context_us: s.
        steps: T and bands as they were measured.
        rising: the same where no T falls with P or n.
    """

    def __init__(self, target: Target, coefficients: Coefficients, *, of_means: bool, mean_error: float) -> None:
        rows = target.factor_rows.values()
        told = target.factors_applied and (sum(rows) if of_means else max(rows, default=0.0)) >= _ROWS_MIN
        self._coefficients, self._target = coefficients, target
        self._wider = mean_error if of_means else 0.0
        seen = _seen_of(target, coefficients) if told else {}
        self._seen = {cell: each for cell, each in seen.items() if each.tokens < 0.0} if of_means else seen
        self._factors = target.factors if told and not of_means else {}
        context_us = target.context_us_per_token if self._seen else None
        self.context_us = coefficients.context_token if context_us is None else context_us

    @cached_property
    def steps(self) -> StepTable:
        """See the class."""
        return StepTable(self._nodes, self._nodes, self._target.interval, self._wider)

    @cached_property
    def rising(self) -> StepTable:
        """See the class."""
        falls = list(map(self._fall, _cell_names()[0], _DECODE_SIZES))
        return StepTable(self._nodes.rising(falls), self._nodes, self._target.interval, self._wider)

    def _fall(self, cell: str, size: float) -> float:
        """The factor beyond which steps of this cell are faster than those of fewer requests."""
        interval = self._target.interval
        if cell not in self._seen or interval is None or self._target.factor_rows[cell] < _ROWS_MIN:
            return math.inf
        p10, p90 = interval.strata.get(stratum_name(0.0, size), interval.pooled)
        return max((p90 / max(p10, _FALL_MIN - 1.0)) ** 2, _FALL_MIN)

    def least_us(self, prefill_tokens: float) -> float:
        """The longest measured step of one request with as many tokens to prefill or fewer."""
        least, base, per_token, *_ = self.steps[STRIDE + (piece := piece_of(prefill_tokens))]
        return max(least, base + per_token * prefill_tokens, *self._nodes.prefills[0][:piece])

    @cached_property
    def _nodes(self) -> Nodes:
        """T at the middle of each cell."""
        without = _Kind([each for each in self._seen.values() if each.tokens < 0.0])
        decode_cells, prefill_cells = _cell_names()
        decodes = [
            self._at(cell, without.line(without.nearness(0, math.log2(size))), size, 0.0)
            for cell, size in zip(decode_cells, _DECODE_SIZES, strict=True)
        ]
        kind = _Kind([each for each in self._seen.values() if each.tokens >= 0.0])
        of_tokens = [kind.nearness(1, math.log2(tokens)) for tokens in _TOKENS]
        prefills = []
        for cells, size in zip(prefill_cells, _SIZES, strict=True):
            of_requests = kind.nearness(0, math.log2(size))
            lines = [kind.line(list(map(mul, of_requests, near))) for near in of_tokens]
            prefills.append(list(map(self._at, cells, lines, repeat(size), _TOKENS)))
        prefills[-1] = list(map(max, *prefills[-2:]))
        for row in (decodes, *prefills):
            row[-1] = max(row[-2:])
        return Nodes(decodes, prefills)

    def _at(self, cell: str, line: tuple[float, float], requests: float, tokens: float) -> float:
        """T at the middle of a cell, by the line through those around."""
        x = self._coefficients.us(tokens, requests)
        if not self._seen:
            return x * self._factors.get(cell, 1.0)
        seen, beside_us = self._seen.get(cell), _on(line, x)
        return beside_us if seen is None else beside_us * (seen.y / _on(line, seen.x)) ** seen.share


def _on(line: tuple[float, float], x: float) -> float:
    """The line at x, within its guards."""
    return min(max(line[0] + line[1] * x, x / _RATIO_MAX), x * _RATIO_MAX)


def _seen_of(target: Target, coefficients: Coefficients) -> dict[str, _Seen]:
    """Cells by name; those that say nothing are left out."""
    b_context = coefficients.context_token
    context_us, seen = target.context_us_per_token, {}
    for cell, (tokens, requests, context, us) in islice(target.usual_work.items(), _CELLS_MAX):
        x = coefficients.us(tokens, requests)
        y = us - (b_context if context_us is None else context_us) * context
        if x > 0.0 and x + b_context * context > 0.0 and x < y * _RATIO_MAX < x * _RATIO_MAX * _RATIO_MAX:
            rows = max(target.factor_rows.get(cell, 0.0), 1.0)
            seen[cell] = _Seen(_log2(requests), _log2(tokens), x, y, rows / (rows + _HALF_ROWS))
    return seen


def _log2(number: float) -> float:
    """Of prefill tokens or requests, from 1 on; below zero where there are none."""
    return math.log2(number) if number > 1.0 else 0.0 if number > 0.0 else -1.0
