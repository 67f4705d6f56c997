"""What a step of any batch shape takes: the names of shapes, and one surface through what was seen of them.

A step is described by its prefill tokens P, its requests n and its tokens of decode context C. Two partitions of
(P, n) exist, both by integers only.

**Stratum**, for intervals. o = floor(log2 n), 0 to 15 (n < 1 counts as 1):

    decode:LOW-HIGH   P = 0        prefill:LOW-HIGH   P > 0        LOW = 2^o, HIGH = 2^(o+1) - 1, one number if equal

**Cell**, finer, for shape factors. Without prefill, by n rounded to an integer (half to even):

    n <= 16            decode:n                       every batch size is a kernel of its own
    n > 16             decode:LOW-HIGH                eights: 17-24, 25-32, …, 889-896, and then 897+

With prefill, by the octave of n (at most 11) and the half octave of P, k = floor(2 log2 P), at most 31:

    prefill:LOW-HIGH:TLOW-THIGH                       TLOW = ceil(2^(k/2)), THIGH = ceil(2^((k+1)/2)) - 1

k = 1 holds no whole number, only means of several steps; its THIGH is below its TLOW, and it is named 1.5. The last
class of each kind has no end and is named LOW+.

**Surface.** r_c rows of cell c were seen; P_c, n_c, C_c are the usual work of its steps, t_c their microseconds; s is
what a token of context costs among steps of about one size, b_C where nobody said. Cells with prefill and cells without
it are two kinds. At the middle (P, n) of every cell of a kind, seen or not:

    x    = b0 + bP P + bn n + be (1 - (1 - k/E)^(P + n))    x_c the same of P_c, n_c
    l_c  = log (t_c - s C_c) / x_c
    v_c  = 8^-d_c w_c,  w_c = r_c / (r_c + r)               d_c = |log2 n_c / n| + |log2 P_c / P|
    l    = sum v_c l_c / sum v_c                            what the cells beside say
    T    = x exp(l + w_c (l_c - l))                         what the cell itself knows; w_c is 0 without rows

    step = T(P, n) + s C                                    T between the middles around: straight in P and in n

and at least what the same requests take without prefill. Where nobody said what a cell usually had, l_c is the
logarithm of its published factor, in its middle. Where a row is the mean of many steps, only one without prefill has
the shape of the steps in it, and with prefill T = x. Where no cell has 64 rows, or of means all cells have fewer, the
coefficients are all there is: T = x, s = b_C.

**Monotone.** Requests are asked about by a surface that falls nowhere by chance. A prefill takes at least what smaller
ones took. Without prefill T is fitted by isotonic regression, but where a batch was measured to be faster than those
before it, as multiples of four are in some kernels: by four standard errors of both (those of a cell are the spread of
its stratum over sqrt r_c).

**Shrinkage.** A row of a cell is off by its noise, whose variance is that of the pooled interval, and a cell from what
the others beside say by misfit, of which the noise of its rows is no part. r = noise² / misfit² rows (0.5 to 64; 8
while misfit is looked for) weigh as much as those others.

be is of a mixture of E experts, k of which each token goes through; 0 where nobody said.

Microseconds. Guards: r_c >= 1; a cell whose ratio is not within a fifth and five, such as the one step that compiled,
says nothing; beyond the last middles no T falls.

References: Frisch and Waugh, Partial time regressions as compared with individual trends (Econometrica 1933), for s;
Nadaraya, On estimating regression (Theory of Probability 1964), for l; Robertson, Wright and Dykstra, Order Restricted
Statistical Inference (1988), for isotonic regression.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from functools import cache, cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from .document import ACTIVE_EXPERTS, Interval, Ratios, Shape, Target

FEATURES = ("intercept", "prefill_tokens", "decode_context_tokens", "requests")
NORMAL_P90 = 1.2816
Band = tuple[float, float, float]
"""Microseconds in the middle, below and above."""

_STRATUM_OCTAVE_MAX = 15
_HALF_ROWS, _HALF_MIN, _HALF_MAX = 8.0, 0.5, 64.0
_ROWS_MIN = 64.0
_RATIO_MAX = 5.0
_PER_OCTAVE = -math.log(8.0)
_FALL_ERRORS = 4.0
_NOBODY_SAID = Interval((1.0, 1.0), {})

_DECODE_FIRST = (*range(1, 17), *range(17, 898, 8))
_DECODE_ENDS = (*_DECODE_FIRST[1:], 2 * _DECODE_FIRST[-1])
_OCTAVES, _HALVES = range(12), range(32)
_DECODE_SIZES = [0.5 * (first + end - 1) for first, end in zip(_DECODE_FIRST, _DECODE_ENDS, strict=True)]
_SIZES = [0.5 * (3 * 2**octave - 1) for octave in _OCTAVES]
_TOKENS = [2.0 ** (0.5 * half + 0.25) for half in _HALVES]
"""Middles of the cells: requests of those without prefill; requests and prefill tokens of those with prefill."""


class Coefficients(NamedTuple):
    """Microseconds by feature; ``missed`` is 1 - k/E, the share of experts that one token leaves alone."""

    us: Mapping[str, float]
    missed: float

    def work(self, prefill_tokens: float, requests: float, decode_context_tokens: float) -> dict[str, float]:
        """What a step has of each feature."""
        touched = 1.0 - self.missed ** max(prefill_tokens + requests, 0.0)
        counts = (1.0, prefill_tokens, decode_context_tokens, requests, touched)
        return dict(zip((*FEATURES, ACTIVE_EXPERTS), counts, strict=True))

    def terms(self, prefill_tokens: float, requests: float, decode_context_tokens: float) -> dict[str, float]:
        """What each of them costs."""
        work = self.work(prefill_tokens, requests, decode_context_tokens)
        return {name: us * work[name] for name, us in self.us.items()}

    def step_us(self, prefill_tokens: float, requests: float, decode_context_tokens: float = 0.0) -> float:
        """The whole step; x without its context."""
        return sum(self.terms(prefill_tokens, requests, decode_context_tokens).values())


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


class _Cell(NamedTuple):
    """A cell by name, and its middle."""

    name: str
    requests: float
    tokens: float = 0.0


@cache
def _cells() -> tuple[list[_Cell], list[list[_Cell]]]:
    """Those without prefill, and those with it by octaves of requests and half octaves of tokens."""
    tokens = [_range(math.ceil(2 ** (half / 2)), math.ceil(2 ** ((half + 1) / 2)) - 1) for half in _HALVES]
    tokens[1], tokens[-1] = "1.5", f"{tokens[-1].partition('-')[0]}+"
    sizes = [_range(2**octave, 2 ** (octave + 1) - 1) for octave in _OCTAVES]
    sizes[-1] = f"{sizes[-1].partition('-')[0]}+"
    decodes = [_range(*ends) for ends in zip(_DECODE_FIRST, (n - 1 for n in _DECODE_ENDS), strict=True)]
    decodes[-1] = f"{_DECODE_FIRST[-1]}+"
    return (
        [_Cell(f"decode:{name}", size) for name, size in zip(decodes, _DECODE_SIZES, strict=True)],
        [
            [_Cell(f"prefill:{name}:{each}", size, at) for each, at in zip(tokens, _TOKENS, strict=True)]
            for name, size in zip(sizes, _SIZES, strict=True)
        ],
    )


def _range(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low}-{high}"


class _Nodes(NamedTuple):
    """T at the middles of cells: without prefill by requests; with prefill by requests (rows) and tokens (columns)."""

    decodes: list[float]
    prefills: list[list[float]]

    def us(self, prefill_tokens: float, requests: float) -> float:
        """T, straight between the middles around."""
        size = max(requests, 1.0)
        least_us = _at(_DECODE_SIZES, self.decodes, size)
        if prefill_tokens <= 0.0:
            return least_us
        after, part = _around(_SIZES, size)
        few_us, many_us = (_at(_TOKENS, row, prefill_tokens) for row in self.prefills[after - 1 : after + 1])
        return max(least_us, few_us + part * (many_us - few_us))


def _around(middles: Sequence[float], place: float) -> tuple[int, float]:
    """The second of the two middles around a place, or of those nearest to it; how far it is between them."""
    after = bisect_right(middles, place, 1, len(middles) - 1)
    return after, (place - middles[after - 1]) / (middles[after] - middles[after - 1])


def _at(middles: Sequence[float], values: Sequence[float], place: float) -> float:
    """The line through the values at the two middles around."""
    after, part = _around(middles, place)
    return values[after - 1] + part * (values[after] - values[after - 1])


def unsure(band: Band, off_us: float) -> Band:
    """The same with another reason to be off, each way, that does not depend on it: their squares are added."""
    us, low, high = band
    return us, max(us - math.hypot(us - low, off_us), 0.0), us + math.hypot(high - us, off_us)


class _Seen(NamedTuple):
    """A cell with rows: log2 of n_c and of P_c, -1 without; l_c; r_c; w_c."""

    requests: float
    tokens: float
    log_ratio: float
    rows: float
    share: float


class StepSurface:
    """The surface of one configuration by the module's formulas.

    Attributes:
        context_us: s.
    """

    def __init__(self, target: Target, coefficients: Coefficients, *, of_means: bool, wider: float) -> None:
        rows = [shape.rows for shape in target.shapes.values()]
        told = target.factors_applied and (sum(rows) if of_means else max(rows, default=0.0)) >= _ROWS_MIN
        self._of_means, self._wider = of_means, wider
        self._coefficients, self._interval = coefficients, target.interval or _NOBODY_SAID
        context_us = target.context_us_per_token if told else None
        self.context_us = coefficients.us.get("decode_context_tokens", 0.0) if context_us is None else context_us
        decodes, prefills = _cells()
        prefill_cells = [] if of_means else list(chain.from_iterable(prefills))
        shapes = target.shapes if told else {}
        kinds = [
            {cell.name: seen for cell in cells if cell.name in shapes and (seen := self._seen(cell, shapes[cell.name]))}
            for cells in (decodes, prefill_cells)
        ]
        scatter = _scatter(self._interval.pooled)
        noise = scatter * scatter  # inf where a power overflows
        misfit = _misfit(kinds, noise)
        half = min(max(noise / misfit, _HALF_MIN), _HALF_MAX) if misfit else _HALF_MAX
        self._decodes, self._prefills = (
            {name: each._replace(share=each.rows / (each.rows + half)) for name, each in kind.items()} for kind in kinds
        )

    def band(
        self, prefill_tokens: float, requests: float, decode_context_tokens: float, *, monotone: bool = False
    ) -> Band:
        """us, low and high of a step as such steps were measured, or ``monotone``: where no T falls by chance."""
        nodes = self._monotone if monotone else self._measured
        us = nodes.us(prefill_tokens, requests) + self.context_us * decode_context_tokens
        p10, p90 = self._ratios(prefill_tokens, requests)
        _, low, high = unsure((1.0, min(p10, 1.0), max(p90, 1.0)), self._wider)
        return us, us * low, us * high

    @cached_property
    def rises(self) -> list[int]:
        """Numbers of requests between which times rise, up to the last that is faster than those before; or none."""
        falls = [size for size, (before, after) in enumerate(pairwise(self._monotone.decodes), 2) if after < before]
        return [math.ceil(size) for size in _DECODE_SIZES[: max(falls, default=0)]]

    def _ratios(self, prefill_tokens: float, requests: float) -> Ratios:
        """p10 and p90 of a stratum, or of all where it has none."""
        return self._interval.strata.get(stratum_name(prefill_tokens, requests), self._interval.pooled)

    def _seen(self, cell: _Cell, shape: Shape) -> _Seen | None:
        """What the rows of a cell say; None where that cannot be."""
        tokens, requests, ratio = cell.tokens, cell.requests, shape.factor
        if shape.usual is not None:
            tokens, requests, context, us = shape.usual
            x = self._coefficients.step_us(tokens, requests)
            possible = x > 0.0 < self._coefficients.step_us(tokens, requests, context)
            ratio = (us - self.context_us * context) / x if possible else 0.0
        if not 1.0 / _RATIO_MAX < ratio < _RATIO_MAX:
            return None
        rows = max(shape.rows, 1.0)
        return _Seen(_log2(requests), _log2(tokens), math.log(ratio), rows, rows / (rows + _HALF_ROWS))

    @cached_property
    def _measured(self) -> _Nodes:
        """T at the middle of each cell."""
        decode_cells, prefill_cells = _cells()
        decodes = [self._us(cell, self._decodes) for cell in decode_cells]
        least = [_at(_DECODE_SIZES, decodes, row[0].requests) for row in prefill_cells]
        prefills = [
            [max(self._us(cell, self._prefills), us) for cell in row]
            for row, us in zip(prefill_cells, least, strict=True)
        ]
        prefills[-1] = list(map(max, *prefills[-2:]))
        for row in (decodes, *prefills):
            row[-1] = max(row[-2:])
        return _Nodes(decodes, prefills)

    def _us(self, cell: _Cell, kind: Mapping[str, _Seen]) -> float:
        """T at the middle of a cell."""
        log_ratio = _beside(kind.values(), math.log2(cell.requests), _log2(cell.tokens))
        if (seen := kind.get(cell.name)) is not None:
            log_ratio += seen.share * (seen.log_ratio - log_ratio)
        return self._coefficients.step_us(cell.tokens, cell.requests) * math.exp(log_ratio)

    @cached_property
    def _monotone(self) -> _Nodes:
        """T where nothing falls by chance."""
        decodes, prefills = self._measured
        along_tokens = [list(accumulate(row, max)) for row in prefills]
        along_both = list(accumulate(along_tokens, lambda *rows: list(map(max, *rows))))
        return _Nodes(_isotonic(decodes, list(map(self._error, _cells()[0]))), along_both)

    def _error(self, cell: _Cell) -> float:
        """Standard error of T of a cell without prefill, in parts of it: by the spread of its stratum."""
        if self._of_means or cell.name not in self._decodes:
            return math.inf
        return _scatter(self._ratios(0.0, cell.requests)) / math.sqrt(self._decodes[cell.name].rows) or math.inf


def _isotonic(values: Sequence[float], errors: Sequence[float]) -> list[float]:
    """The nearest in least squares that fall nowhere by chance: neighbours that do are pooled."""
    pools: list[tuple[float, int, float]] = []
    for value, error in zip(values, errors, strict=True):
        mean, count, off = value, 1, error
        while pools and mean < pools[-1][0] < mean * (1.0 + _FALL_ERRORS * math.hypot(pools[-1][2], off)):
            before, many, before_off = pools.pop()
            off = math.hypot(before_off * many, off * count) / (many + count)
            mean, count = (before * many + mean * count) / (many + count), many + count
        pools.append((mean, count, off))
    return [mean for mean, count, _ in pools for _ in range(count)]


def _scatter(ratios: Ratios) -> float:
    """Standard deviation of the steps of a stratum, of which eight in ten are between these ratios."""
    return (ratios[1] - ratios[0]) / (2.0 * NORMAL_P90)


def _misfit(kinds: Sequence[Mapping[str, _Seen]], noise: float) -> float:
    """Variance of l_c from what the other cells beside say, without that of its rows."""
    total = apart = 0.0
    for kind in kinds:
        for name, each in kind.items():
            others = [other for key, other in kind.items() if key != name]
            total += each.share
            apart += each.share * (
                (each.log_ratio - _beside(others, each.requests, each.tokens)) ** 2 - noise / each.rows
            )
    return max(apart / total, 0.0) if total else 0.0


def _beside(kind: Collection[_Seen], requests: float, tokens: float) -> float:
    """Mean l of cells, by how near they are to a place."""
    total = weighted = 0.0
    for each in kind:
        near = each.share * math.exp(_PER_OCTAVE * (abs(each.requests - requests) + abs(each.tokens - tokens)))
        total += near
        weighted += near * each.log_ratio
    return weighted / total if total > 0.0 else 0.0


def _log2(number: float) -> float:
    """Of prefill tokens or requests, from 1 on; below zero where there are none."""
    return math.log2(number) if number > 1.0 else 0.0 if number > 0.0 else -1.0
