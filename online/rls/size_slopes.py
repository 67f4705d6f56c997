"""What a column costs among steps of about one size without prefill: its slope inside of strata.

No line follows padded batches and rooflines, so a coefficient of one line through all steps stands in for them as far
as they come with its column: that of decode context is off by up to a half on machines whose cost of a token of context
is known. An intercept and slopes of each stratum's own take that up. Of the statistics G_s (q, q) of stratum s
(strata.py), with column j apart from the other features o:

    d_s = A_jj - A_jo A_oo^-1 A_oj      n_s = b_j - A_jo A_oo^-1 b_o          A, b: blocks of G_s
    slope = sum_s n_s / sum_s d_s       sd = scale / sqrt(sum_s d_s)          of strata with d_s > 1e-4 A_jj

Microseconds per unit of j. Guards: a relative ridge of 1e-6 on A_oo, a hundredth of the least d_s; None unless the
slope is ten times its sd.

Reference: Frisch and Waugh, Partial time regressions as compared with individual trends (Econometrica 1933).
"""

from __future__ import annotations

import math

import numpy as np

from online.rows import Floats

from .solve import NOTHING, RELATIVE_RIDGE

# Guard: a stratum in which the column hardly varies is left out.
_VARIES = 1e-4
# Guess: a slope is told only where it is sure.
_TIMES_SD = 10.0


def slope_inside(strata: Floats, column: int, scale: float) -> float | None:
    """Slope of ``column`` inside of these strata (s, q, q), rows scattering by ``scale``; None if it is not sure."""
    target = strata.shape[1] - 2
    others = np.array([each for each in range(target) if each != column], np.int64)
    strata = strata[strata[:, column, column] > NOTHING]
    diagonal = strata[:, others, others]
    present = diagonal > NOTHING
    # A column that has nothing to say in a stratum is its own row of the identity there.
    norm = present / np.sqrt(np.where(present, diagonal, 1.0))
    system = strata[:, others[:, None], others] * norm[:, :, None] * norm[:, None]
    system[:, range(len(others)), range(len(others))] = 1.0 + RELATIVE_RIDGE
    crossed = strata[:, others[:, None], [column, target]] * norm[:, :, None]
    explained = (crossed[:, :, :1] * np.linalg.solve(system, crossed)).sum(axis=1)
    left = strata[:, column, [column, target]] - explained
    total, wanted = left[left[:, 0] > _VARIES * strata[:, column, column]].sum(axis=0).tolist()
    slope = wanted / total if total > 0.0 else 0.0
    return slope if slope > 0.0 and slope * math.sqrt(total) > _TIMES_SD * scale else None
