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
class of each kind has no end and is named LOW+. A name is read by its LOW and TLOW, its smallest step.

**Surface.** r_c rows of cell c were seen; P_c, n_c, C_c are the usual work of its steps, t_c their microseconds; s is
what a token of context costs among steps of about one size. It is b_C where nobody said, or where a row is the mean of
many steps, which are of many sizes. Cells with prefill and cells without it are two kinds. At the middle (P, n) of
every cell of a kind, seen or not:

    x    = b0 + bP P + bn n + be (1 - (1 - k/E)^(P + n))    x_c the same of P_c, n_c
    l_c  = log (t_c - s C_c) / x_c
    v_c  = 8^-d_c w_c,  w_c = r_c / (r_c + h)               d_c = |log2 n_c / n| + |log2 P_c / P|
    l    = sum v_c l_c / sum v_c                            what the cells beside say
    T    = x exp(l + w_c (l_c - l))                         what the cell itself knows; w_c is 0 without rows

    step = T(P, n) + s C                                    T between the middles around: straight in P and in n

and at least what the same requests take without prefill. Where nobody said what a cell usually had, l_c is the
logarithm of its published factor, in its middle.

h is 8, or 1 where a row is the mean of many steps. Such a row is hardly ever of one shape, and tells of the size of its
batches alone: all cells are of one kind, P is no part of d_c, and l_c is what it was before F_c was shrunk,
(log F_c) (r_c + 8) / r_c. Where no cell has 64 rows, or of means all cells have fewer, the coefficients are all there
is: T = x, s = b_C.

**Monotone.** Requests are asked about by a surface that falls nowhere by chance. Along n T is fitted by isotonic
regression, each cell weighed by its w_c. Without prefill it may fall where a batch was measured to be faster than those
before it by four standard errors of both, as multiples of four are in some kernels. The standard error of a cell is the
spread of its stratum over sqrt r_c. Then a prefill takes at least what fewer tokens took among as many requests.

**Band.** It has the spread of the step's stratum, and is wider by how far T is from that of cells that are believed
whole, with w_c = 1: what few rows say, or rows that are faster than those of smaller steps, may be no chance.

be is of a mixture of E experts, k of which each token goes through; 0 where nobody said.

Microseconds. Guards: r_c >= 1; a cell whose ratio is not within a fifth and five, such as the one step that compiled,
says nothing; beyond the last middles no T falls.

References: Frisch and Waugh, Partial time regressions as compared with individual trends (Econometrica 1933), for s;
Nadaraya, On estimating regression (Theory of Probability 1964), for l; Robertson, Wright and Dykstra, Order Restricted
Statistical Inference (1988), for isotonic regression.
"""

from __future__ import annotations

import math
import operator
import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from .document import ACTIVE_EXPERTS, Interval, Ratios, Shape, Target

FEATURES = ("intercept", "prefill_tokens", "decode_context_tokens", "requests")
NORMAL_P90 = 1.2816
Band = tuple[float, float, float]
"""Microseconds in the middle, below and above."""

_STRATUM_OCTAVE_MAX = 15
_NEAREST_FIRST = sorted(range(-_STRATUM_OCTAVE_MAX, _STRATUM_OCTAVE_MAX + 1), key=abs)
_HALF_ROWS, _HALF_MEANS = 8.0, 1.0
"""h of the module. A row that is a mean is of so many steps that it stands for itself."""
_ROWS_MIN = 64.0
_RATIO_MAX = 5.0
_PER_OCTAVE = -math.log(8.0)
_FALL_ERRORS = 4.0
_UNSEEN_SHARE, _UNSEEN_ERROR = 1e-6, 100.0
"""Of a cell without rows, not 0 and infinite: it follows those with rows, and a pool of such cells has a mean."""
_NOBODY_SAID = Interval((1.0, 1.0), {})

_DECODE_FIRST = (*range(1, 17), *range(17, 898, 8))
_DECODE_ENDS = (*_DECODE_FIRST[1:], 2 * _DECODE_FIRST[-1])
_OCTAVES, _HALVES = range(12), range(32)
_CELL = re.compile(r"(?:decode|prefill):(\d{1,9})[-+\d]*(?::(\d{1,9}(?:\.5)?)[-+\d]*)?")
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
    low = 2 ** _octave(requests, _STRATUM_OCTAVE_MAX)
    high = 2 * low - 1
    return f"{'prefill' if prefill_tokens > 0 else 'decode'}:{low if low == high else f'{low}-{high}'}"


def _octave(requests: float, most: int) -> int:
    return min(max(int(requests).bit_length() - 1, 0), most)


def smallest_step(cell: str) -> tuple[float, float] | None:
    """Prefill tokens and requests of a cell's smallest step, of half octaves at least; None of what names no cell.

    >>> smallest_step("prefill:16-31:256-362"), smallest_step("decode:897+")
    ((256.0, 16.0), (0.0, 897.0))
    """
    found = _CELL.fullmatch(cell)
    return None if found is None else (float(found[2] or 0.0), float(found[1]))


_Place = tuple[int, int]
"""Of a cell among the middles: of requests, and of prefill tokens; -1 without prefill."""


def middle_of(cell: str) -> tuple[float, float] | None:
    """Prefill tokens and requests in the middle of a cell; None of what names no cell."""
    step = smallest_step(cell)
    return None if step is None else _middle(_place(*step))


def _place(prefill_tokens: float, requests: float) -> _Place:
    """Of the cell of a step."""
    if prefill_tokens <= 0.0:
        return bisect_right(_DECODE_FIRST, requests, 1) - 1, -1
    return _octave(requests, _OCTAVES[-1]), min(max(int(2.0 * math.log2(prefill_tokens)), 0), _HALVES[-1])


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


def _middle(place: _Place) -> tuple[float, float]:
    """Prefill tokens and requests in the middle of a cell."""
    row, half = place
    return (0.0, _DECODE_SIZES[row]) if half < 0 else (_TOKENS[half], _SIZES[row])


def _around(middles: Sequence[float], place: float) -> tuple[int, float]:
    """The second of the two middles around a place, or of those nearest to it; how far it is between them."""
    after = bisect_right(middles, place, 1, len(middles) - 1)
    return after, (place - middles[after - 1]) / (middles[after] - middles[after - 1])


def _at(middles: Sequence[float], values: Sequence[float], place: float) -> float:
    """The line through the values at the two middles around."""
    after, part = _around(middles, place)
    return values[after - 1] + part * (values[after] - values[after - 1])


def together(*bands: Band) -> Band:
    """The sum of times whose errors do not depend on each other: the squares of these are added."""
    middles, lows, highs = zip(*bands, strict=True)
    below, above = (math.hypot(*map(operator.sub, middles, ends)) for ends in (lows, highs))
    us = sum(middles)
    return us, max(us - below, 0.0), us + above


def unsure(band: Band, off_us: float) -> Band:
    """The same with another reason to be off, each way."""
    return together(band, (0.0, -off_us, off_us))


class _Seen(NamedTuple):
    """A cell with rows: log2 of n_c and of P_c, -1 without; l_c; r_c; w_c."""

    requests: float
    tokens: float
    log_ratio: float
    rows: float
    share: float


_Cells = Mapping[_Place, _Seen]
"""Those with rows, of one kind."""


class StepSurface:
    """The surface of one configuration by the module's formulas.

    Attributes:
        context_us: s.
    """

    def __init__(self, target: Target, coefficients: Coefficients, *, of_means: bool, wider: float) -> None:
        rows = [shape.rows for shape in target.shapes.values()]
        told = (sum(rows) if of_means else max(rows, default=0.0)) >= _ROWS_MIN
        self._of_means, self._wider = of_means, wider
        self._coefficients, self._interval = coefficients, target.interval or _NOBODY_SAID
        self._nearest: dict[str, Ratios] = {}
        context_us = target.context_us_per_token if told and not of_means else None
        self.context_us = coefficients.us.get("decode_context_tokens", 0.0) if context_us is None else context_us
        self._decodes: dict[_Place, _Seen] = {}
        self._prefills = self._decodes if of_means else {}
        for name, shape in target.shapes.items() if told else ():
            step = smallest_step(name)
            if step is not None and (seen := self._seen(_place(*step), shape)) is not None:
                (self._prefills if step[0] else self._decodes)[_place(*step)] = seen

    def band(
        self, prefill_tokens: float, requests: float, decode_context_tokens: float, *, monotone: bool = False
    ) -> Band:
        """us, low and high of a step as such steps were measured, or ``monotone``: where no T falls by chance."""
        nodes = self._monotone if monotone else self._measured
        shape_us = nodes.us(prefill_tokens, requests)
        us = shape_us + self.context_us * decode_context_tokens
        p10, p90 = self._ratios(prefill_tokens, requests)
        doubted_us = shape_us - self._believed.us(prefill_tokens, requests)
        return unsure((us, us * min(p10, 1.0), us * max(p90, 1.0)), math.hypot(self._wider * us, doubted_us))

    @cached_property
    def rises(self) -> list[int]:
        """Numbers of requests between which times rise, up to the last that is faster than those before; or none."""
        falls = [size for size, (before, after) in enumerate(pairwise(self._monotone.decodes), 2) if after < before]
        return [math.ceil(size) for size in _DECODE_SIZES[: max(falls, default=0)]]

    def _ratios(self, prefill_tokens: float, requests: float) -> Ratios:
        """p10 and p90 of a stratum, or of the nearest of its kind that has them, or of all."""
        stratum, strata = stratum_name(prefill_tokens, requests), self._interval.strata
        if stratum not in self._nearest:
            sizes = (max(requests, 1.0) * 2.0**octaves for octaves in _NEAREST_FIRST)
            names = (stratum_name(prefill_tokens, size) for size in sizes)
            self._nearest[stratum] = next((strata[name] for name in names if name in strata), self._interval.pooled)
        return self._nearest[stratum]

    def _seen(self, place: _Place, shape: Shape) -> _Seen | None:
        """What the rows of a cell say; None where that cannot be."""
        (tokens, requests), ratio = _middle(place), shape.factor
        rows = max(shape.rows, 1.0)
        share = rows / (rows + (_HALF_MEANS if self._of_means else _HALF_ROWS))
        if shape.usual is not None:
            tokens, requests, context, us = shape.usual
            x = self._coefficients.step_us(tokens, requests)
            possible = x > 0.0 < self._coefficients.step_us(tokens, requests, context)
            ratio = (us - self.context_us * context) / x if possible else 0.0
        if self._of_means:
            tokens, ratio = 0.0, min(max(shape.factor, 0.0), _RATIO_MAX) ** ((rows + _HALF_ROWS) / rows)
        if not 1.0 / _RATIO_MAX < ratio < _RATIO_MAX:
            return None
        return _Seen(log2(requests), log2(tokens), math.log(ratio), rows, share)

    @cached_property
    def _measured(self) -> _Nodes:
        """T at the middle of each cell."""
        return self._nodes(self._decodes, self._prefills)

    @cached_property
    def _believed(self) -> _Nodes:
        """The same if each cell with rows were believed whole."""
        kinds = (self._decodes, self._prefills)
        return self._nodes(*({place: each._replace(share=1.0) for place, each in kind.items()} for kind in kinds))

    def _nodes(self, of_decodes: _Cells, of_prefills: _Cells) -> _Nodes:
        """T by these cells."""
        decodes = [self._us((row, -1), of_decodes) for row in range(len(_DECODE_SIZES))]
        prefills = [
            [max(self._us((row, half), of_prefills), _at(_DECODE_SIZES, decodes, size)) for half in _HALVES]
            for row, size in enumerate(_SIZES)
        ]
        prefills[-1] = list(map(max, *prefills[-2:]))
        for nodes in (decodes, *prefills):
            nodes[-1] = max(nodes[-2:])
        return _Nodes(decodes, prefills)

    def _us(self, place: _Place, kind: _Cells) -> float:
        """T at the middle of a cell."""
        tokens, requests = _middle(place)
        log_ratio = _beside(kind.values(), math.log2(requests), log2(tokens))
        if (seen := kind.get(place)) is not None:
            log_ratio += seen.share * (seen.log_ratio - log_ratio)
        return self._coefficients.step_us(tokens, requests) * math.exp(log_ratio)

    @cached_property
    def _monotone(self) -> _Nodes:
        """T where nothing falls by chance."""
        decodes, prefills = self._measured
        rows = range(len(decodes))
        fitted = _isotonic(decodes, _shares(self._decodes, [(row, -1) for row in rows]), list(map(self._error, rows)))
        along_requests = [
            _isotonic(column, _shares(self._prefills, [(row, half) for row in _OCTAVES]), [math.inf] * len(column))
            for half, column in zip(_HALVES, zip(*prefills, strict=True), strict=True)
        ]
        return _Nodes(fitted, [list(accumulate(row, max)) for row in zip(*along_requests, strict=True)])

    def _error(self, row: int) -> float:
        """Standard error of T of a cell without prefill, in parts of it: by the spread of its stratum."""
        if (row, -1) not in self._decodes:
            return _UNSEEN_ERROR
        spread = _scatter(self._ratios(0.0, _DECODE_SIZES[row]))
        return spread / math.sqrt(self._decodes[row, -1].rows) or math.inf


def _shares(kind: _Cells, places: Sequence[_Place]) -> list[float]:
    """Shares w of the cells at these places; next to none of cells without rows."""
    return [kind[place].share if place in kind else _UNSEEN_SHARE for place in places]


def _isotonic(values: Sequence[float], weights: Sequence[float], errors: Sequence[float]) -> list[float]:
    """The nearest in least squares that fall nowhere by chance: neighbours that do are pooled."""
    pools: list[tuple[float, int, float, float]] = []
    for value, share, error in zip(values, weights, errors, strict=True):
        mean, count, weight, off = value, 1, share, error
        while pools and mean < pools[-1][0] < mean * (1.0 + _FALL_ERRORS * math.hypot(pools[-1][3], off)):
            before, many, much, before_off = pools.pop()
            off = math.hypot(before_off * much, off * weight) / (much + weight)
            mean = (before * much + mean * weight) / (much + weight)
            count, weight = many + count, much + weight
        pools.append((mean, count, weight, off))
    return [mean for mean, count, *_ in pools for _ in range(count)]


def _scatter(ratios: Ratios) -> float:
    """Standard deviation of the steps of a stratum, of which eight in ten are between these ratios."""
    return (ratios[1] - ratios[0]) / (2.0 * NORMAL_P90)


def _beside(kind: Collection[_Seen], requests: float, tokens: float) -> float:
    """Mean l of cells, by how near they are to a place."""
    total = weighted = 0.0
    for each in kind:
        near = each.share * math.exp(_PER_OCTAVE * (abs(each.requests - requests) + abs(each.tokens - tokens)))
        total += near
        weighted += near * each.log_ratio
    return weighted / total if total > 0.0 else 0.0


def log2(number: float) -> float:
    """Of prefill tokens or requests, from 1 on; below zero where there are none."""
    return math.log2(number) if number > 1.0 else 0.0 if number > 0.0 else -1.0
