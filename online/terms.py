"""Which term of the step time moved: a test of a few one-dimensional alternatives.

    A, b                      weighted statistics of the rows after the change: sum w x x', sum w x y
    s = b - A beta            beta: the coefficients from before it
                              by one hypothesis the extra time of a row is a (x u), and u is known:

        all                   u = beta                            every term takes longer alike
        decode                u = beta without prefill columns    all but prefill does
        one column j          u = e_j                             a constant, a prompt token, a token of context, ...

    explained(u) = (u's)^2 / (u'A u)        the drop of the sum of squares, where a = u's / u'A u

The hypothesis that explains most is named. One that stands above it in the table is preferred where it explains 95 %
as much, so that a load which cannot tell two apart names the plain one. Statistics alone are read, so that a change in
time (online/change.py) and a difference between replicas (online/rls/merging.py) get the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .constants import PREFERENCE
from .rows import Floats

EVERY_TERM, DECODE = "all", "decode"


class MovedTerm(NamedTuple):
    """The term: ``all``, ``decode`` or the name of a column; empty where nothing is known.

    ``added``: microseconds per unit of the column; of ``all`` and ``decode``, the share of what they were.
    """

    name: str
    added: float


def moved_term(a: Floats, b: Floats, beta: Floats, names: Sequence[str], *, slower: bool) -> MovedTerm:
    """The term that explains best why rows take more time than by ``beta``.

    Args:
        a: statistics of the rows, (p, p).
        b: the same of columns and times, (p,).
        beta: coefficients that they are compared with, (p,).
        names: of the columns.
        slower: the sign of the extra time; a term that moved the other way is none.
    """
    s = b - a @ beta
    found: dict[str, tuple[float, float]] = {}
    for name, u in _hypotheses(beta, names):
        along, length = float(u @ s), float(u @ a @ u)
        if length > 0.0 and (along > 0.0) == slower:
            found[name] = (along * along / length, along / length)
    most = max((explained for explained, _ in found.values()), default=0.0)
    return next(
        (MovedTerm(name, by) for name, (drop, by) in found.items() if drop >= PREFERENCE * most), MovedTerm("", 0)
    )


def is_of_prefill(name: str) -> bool:
    """Whether a column, or a term, is about prefill."""
    return name.startswith("prefill")


def _hypotheses(beta: Floats, names: Sequence[str]) -> Iterator[tuple[str, Floats]]:
    """Name and direction u (p,) of each, the plain ones first."""
    yield EVERY_TERM, beta
    of_prefill = np.array([*map(is_of_prefill, names)])
    if beta[of_prefill].any():
        yield DECODE, np.where(of_prefill, 0.0, beta)
    for index, name in enumerate(names):
        yield name, np.eye(len(names))[index]
