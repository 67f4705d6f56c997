"""Active selection (HFD-TL): which rows of a donor are worth keeping.

Rows are put into strata of queue and cache, (waiting: 0, 1-2, 3-7, 8 and more) x (usage: quarters), and of each
stratum the rows are taken that the fit is least sure of, one at a time:

    i* = argmax x_i' C x_i        C <- C - C x x' C / (1 + x' C x)        C = (A + ridge)^-1, rows in relative units

so that a taken row makes its like uninteresting. The strata keep rare operating points in, however alike their rows.
Reference: docs/systems.md, source 5; Fedorov, Theory of Optimal Experiments (1972), the D-optimal exchange.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from online.rows import Floats, Ints, RowBlock, Target

QUEUE_EDGES = (1.0, 3.0, 8.0)
USAGE_EDGES = (0.25, 0.5, 0.75)
_RIDGE = 1e-6


def selection_strata(target: Target, rows: RowBlock) -> Ints:
    """Stratum of each row by its first step, shape (n,); what is not known counts as none waiting, nothing used."""
    first = rows.raw[rows.offsets[:-1]]
    waiting = np.nan_to_num(first[:, target.vocabulary.index("waiting")])
    usage = np.nan_to_num(first[:, target.vocabulary.index("kv_usage_ratio")])
    return np.asarray(np.digitize(waiting, QUEUE_EDGES) * 4 + np.digitize(usage, USAGE_EDGES), np.int64)


def select(x: Floats, elapsed_us: Floats, stratum: Ints, per_stratum: int) -> NDArray[np.intp]:
    """Indices of the rows to keep, ascending; at most ``per_stratum`` of each stratum.

    Args:
        x: (n, p) features; rows that are not finite are never taken.
        elapsed_us: (n,) times, > 0.
        stratum: (n,) from :func:`selection_strata`.
        per_stratum: how many.
    """
    usable = np.isfinite(x).all(axis=1) & (elapsed_us > 0.0)
    relative = np.where(usable[:, None], x / np.where(elapsed_us > 0.0, elapsed_us, 1.0)[:, None], 0.0)
    scale = np.sqrt(np.maximum((relative**2).sum(axis=0), 1e-300))
    relative = relative / scale
    taken: list[int] = []
    for value in np.unique(stratum[usable]):
        inside = np.flatnonzero(usable & (stratum == value))
        covariance = np.eye(x.shape[1]) / _RIDGE
        candidates = relative[inside]
        for _ in range(min(per_stratum, len(inside))):
            variance = np.einsum("ij,jk,ik->i", candidates, covariance, candidates)
            best = int(np.argmax(variance))
            taken.append(int(inside[best]))
            row = candidates[best]
            gain = covariance @ row
            covariance = covariance - np.outer(gain, gain) / (1.0 + float(row @ gain))
            candidates = np.delete(candidates, best, axis=0)
            inside = np.delete(inside, best)
    return np.array(sorted(taken), np.intp)
