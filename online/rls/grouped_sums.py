"""Decayed sums over groups of rows: what statistics by stratum and by operating point have in common.

    left_i = 2^(-sum of e over the later rows of its group)     kept_g = 2^(-sum of e over the group), at least 2^-1000
    P_g    = sum_i l_i r_i'                                     l, r: rows (n, q) in the order of the groups

One matrix product per group: gathering q (q + 1) / 2 columns of both sides and adding them up by group takes two to
four times as long from a few hundred rows on.
"""

from __future__ import annotations

import numpy as np

from online.blocks import Groups
from online.rows import Floats

# Guard: underflow.
MAX_AGE = 1000.0
"""2^-1000 is still a normal number; older is 0 for every purpose."""


def decays_of(groups: Groups, e: Floats) -> tuple[Floats, Floats]:
    """What later rows leave of each row, (n,), and sum of e by group, (g,); e (n,) in the order of the groups."""
    running = np.cumsum(e)
    ends = running.take(groups.starts + groups.sizes - 1)
    spent = ends.copy()
    spent[1:] -= ends[:-1]
    return np.exp2(running - np.repeat(ends, groups.sizes)), spent


def kept_of(spent: Floats) -> Floats:
    """What is kept where so many half-lives were spent, (g,)."""
    kept: Floats = np.exp2(-np.minimum(spent, MAX_AGE))
    return kept


def products_of(groups: Groups, left: Floats, right: Floats) -> Floats:
    """P of each group, flat: (g, q * q)."""
    q = left.shape[1]
    products = np.empty((len(groups.starts), q, q))
    for out, start, size in zip(products, groups.starts.tolist(), groups.sizes.tolist(), strict=True):
        rows = slice(start, start + size)
        np.dot(left[rows].T, right[rows], out=out)
    return products.reshape(-1, q * q)
