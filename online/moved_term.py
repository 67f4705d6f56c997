"""Which term moved in a change of speed: a test of a few one-dimensional alternatives.

    A, b                      weighted statistics of the rows since the change: sum w x x', sum w x y / F
    s = b - A beta            beta, F: coefficients and shape factors from before it
                              under a hypothesis u every row takes c (x u) longer; c is not known:

        all                   u = beta                            every term takes longer alike
        decode                u = beta without prefill columns    all but prefill does
        one column j          u = e_j                             a constant, a prompt token, a token of context, ...

    every   = s'A^-1 s                      what all terms free would explain
    left(u) = every - (u's)^2 / (u'A u)     and what this one leaves of it
    enough  = 2 min left + 9 min(V, 100 min left) + (0.5 %)^2 beta'A beta
    V: variance of a row's relative time, times 32 where rows are single steps; of n windows
       (sum w y^2 / F^2 - b'A^-1 b) / (n - p), what all terms free leave: slow ones have fewer steps, and as much noise

The hypothesis that leaves least is named where it leaves at most 5 % of ``every``, no other is within ``enough``,
and it moved the way the whole did. Where some are, but none of prefill, ``not_prefill`` is named: on a GPU a constant
makes nearly all of decode, and only a varied load tells these two apart. Else no term is named: rows of one load do not
tell terms apart, and two terms that moved are none. Of windows all of decode that leave at most 5 % are within: their
sums are off by what more of them do not average out, and made decode look like a constant for ten minutes.

By F rows are compared with others of their shape, so that what the form misses counts little (rows of shapes that
hardly were seen, or with work far from theirs, weigh little). Of engines (online/rls/merging.py) nothing was before:
there F is 1, and P and s stand for A and s.

Rows count from the block on that confirmed the change. Windows, such as two pages tell, come a few a minute and
confirm a change only minutes after it began: the last 64 are kept, and those count as well that surely came after it
began.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .blocks import Design
from .constants import NOISE_ROWS, QUIETEST, START_ROWS, SURE_SD, WORTH
from .rows import PHASES, Floats
from .shapes import ShapeFactors, shrinkage
from .state import Stateful

# Derived: three terms that did not move take up less than 1 % of the noise once in 3,800 times; then there is none.
_NO_NOISE = 100.0
EVERY_TERM, DECODE, NOT_PREFILL = "all", "decode", "not_prefill"


class MovedTerm(NamedTuple):
    """The term: ``all``, ``decode``, ``not_prefill`` or the name of a column; empty where nothing is known.

    ``added``: microseconds per unit of the column; of the others, the share of what they were.
    """

    name: str
    added: float


def moved_term(
    a: Floats,
    s: Floats,
    beta: Floats,
    names: Sequence[str],
    *,
    slower: bool,
    noise: float,
    by_windows: bool = False,
) -> MovedTerm:
    """The one term that explains why rows take more time, or less, than by ``beta``; see the module's docstring.

    Args:
        a: A, how surely the rows tell coefficients, (p, p).
        s: how much more time they take, (p,).
        beta: coefficients that they are compared with, (p,).
        names: of the columns.
        slower: whether they take more time on the whole; a term that fell explains no slower steps.
        noise: V, variance of a row's relative time, as if rows did not share theirs.
        by_windows: whether rows are windows.
    """
    squares = float(beta @ a @ beta)
    every = float(s @ np.linalg.lstsq(a, s, rcond=None)[0])
    found = [(every, MovedTerm("", 0.0))]
    for name, u in _hypotheses(beta, names):
        along, length = float(u @ s), float(u @ a @ u)
        if length > 0.0:
            found.append((every - along * along / length, MovedTerm(name, along / length)))
    least = min(left for left, _ in found)
    more = least + SURE_SD**2 * min(noise, _NO_NOISE * least) + QUIETEST**2 * squares
    told = {term.name: term.added for left, term in found if left - least <= more}
    moved = min(found)[1]
    if by_windows and is_of_decode(moved.name):
        told |= {term.name: term.added for left, term in found if is_of_decode(term.name) and left <= WORTH * every}
    if len(told) > 1:
        is_known = DECODE in told and all(map(is_of_decode, told))
        moved = MovedTerm(NOT_PREFILL, told[DECODE]) if is_known else MovedTerm("", 0.0)
    is_sure = least <= WORTH * every and (moved.added > 0.0) == slower
    return moved if is_sure else MovedTerm("", 0.0)


def is_of_prefill(name: str) -> bool:
    """Whether a column, or a term, is about prefill."""
    return name.startswith("prefill")


def is_of_decode(name: str) -> bool:
    """Whether a term is decode or a column of it."""
    return name not in ("", EVERY_TERM) and not is_of_prefill(name)


def _hypotheses(beta: Floats, names: Sequence[str]) -> Iterator[tuple[str, Floats]]:
    """Name and direction u (p,) of each, the plain ones first."""
    yield EVERY_TERM, beta
    of_prefill = np.array([*map(is_of_prefill, names)])
    if beta[of_prefill].any():
        yield DECODE, np.where(of_prefill, 0.0, beta)
    for index, name in enumerate(names):
        yield name, np.eye(len(names))[index]


# ------------------------------------------------------------------- the search after a change


class Reference(Stateful):
    """What rows take at one speed.

    Attributes:
        beta: coefficients of the p features, and phases.
        factors: of shapes, for the same columns.
        window_log_ratio: usual log(y / x beta) of windows, which have no shape.
    """

    SAVED = ("beta", "factors", "window_log_ratio")

    def __init__(self, p: int) -> None:
        columns = p + len(PHASES)
        self.beta, self.factors, self.window_log_ratio = np.zeros(columns), ShapeFactors(columns), 0.0

    def log_factors(self, block: Design) -> tuple[Floats, Floats]:
        """Log F of rows, (n,), and how far it is to be trusted, 0 to 1, (n,)."""
        factors = self.factors
        by_shape = factors.log_factors(block.cell, self.beta)
        trust = shrinkage(factors.rows[block.cell]) * factors.comparability(block.cell, block.x, self.beta)
        wide = block.windows
        return np.where(wide, self.window_log_ratio, by_shape), np.where(wide, 1.0, trust)


class TermSearch(Stateful):
    """Gathers the rows since a change of speed, and tells by them which term moved.

    Attributes:
        rows_left: for how many more rows the term is looked for; 0: it is not.
        reference: from before the change.
        a, b, squares: the statistics of the module's equations: A (p, p), b (p,), and sum w y^2 / F^2.
        rows: how many of the change are in them for sure; a window counts as 32.
        by_windows: whether the last rows were windows.
        windows: the last ones, oldest first, (n, p + 3): columns, time, weight, and end in ns of each.
    """

    SAVED = ("rows_left", "reference", "rows", "a", "b", "squares", "by_windows", "windows")

    def __init__(self, p: int) -> None:
        self.rows_left, self.rows, self.by_windows, self.reference = 0, 0, False, Reference(p)
        self.a, self.b, self.squares = np.zeros((p, p)), np.zeros(p), 0.0
        self.windows: Floats = np.empty((0, p + 3))

    def start(self, since_ns: int) -> None:
        """Begin anew, with the windows that ended after this."""
        self.rows, self.a, self.b, self.squares = 0, np.zeros_like(self.a), np.zeros_like(self.b), 0.0
        if self.by_windows:
            before = np.flatnonzero(self.windows[:, -1] <= since_ns)  # a clock may go back
            since = self.windows[before[-1] + 1 if len(before) else 0 :]
            self.rows = NOISE_ROWS * len(since)
            self._gather(since[:, :-3], since[:, -3], since[:, -2], self.reference.window_log_ratio)

    def count(self, rows: int) -> None:
        """So many rows came after the block by which the change was confirmed, part of which is from before it."""
        self.rows, self.rows_left = self.rows + rows, max(self.rows_left - rows, 0)

    def add(self, block: Design, elapsed_us: Floats, weight: Floats) -> None:
        """Rows that are learned, with times and weights (n,)."""
        self.by_windows = bool(block.windows.all())
        if self.by_windows:
            known = np.column_stack((block.x, elapsed_us, weight, block.end_ns.astype(np.float64)))
            self.windows = np.concatenate((self.windows, known))[-2 * NOISE_ROWS :]
        if self.rows_left:
            log_f, trust = self.reference.log_factors(block)
            self._gather(block.x, elapsed_us, weight * trust, log_f)

    def _gather(self, x: Floats, elapsed_us: Floats, weight: Floats, log_f: Floats | float) -> None:
        weighted = weight[:, None] * x
        self.a += weighted.T @ x
        as_usual_us = elapsed_us * np.exp(-log_f)
        self.b += weighted.T @ as_usual_us
        self.squares += float(weight @ np.square(as_usual_us))

    def find(self, names: Sequence[str], scale: float, *, slower: bool) -> MovedTerm:
        """The term, once two first fits of rows came: fewer are of one load. ``scale``: relative noise of a row."""
        if not self.rows_left or self.rows < 2 * START_ROWS:
            return MovedTerm("", 0.0)
        beta, noise = self.reference.beta[: len(names)], NOISE_ROWS * scale**2
        if self.by_windows:
            left = self.squares - float(self.b @ np.linalg.lstsq(self.a, self.b, rcond=None)[0])
            noise = left / (self.rows / NOISE_ROWS - len(beta))
        s = self.b - self.a @ beta
        return moved_term(self.a, s, beta, names, slower=slower, noise=noise, by_windows=self.by_windows)

    def coefficients_after(self, moved: MovedTerm, names: Sequence[str]) -> Floats:
        """What the term leaves of those from before, and of phases."""
        after = self.reference.beta.copy()
        features = after[: len(names)]
        features += moved.added * dict(_hypotheses(features, names))[moved.name]
        return after
