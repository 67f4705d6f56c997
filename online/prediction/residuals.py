"""Residuals since the beginning: observed divided by predicted, counted and never forgotten.

    r_i = min(y_i / yhat_i, 10)        yhat: by the published coefficients of the champion, before row i was learned
    rows[k] += #{i: bound_{k-1} < r_i <= bound_k}       ratio_sum += sum r_i       10 classes of 9 bounds, dimensionless

Everything else that is said of errors is forgotten exponentially; these only grow, so that a reader can subtract two
of them and has the residuals of the time between, over any window and any number of replicas. Bounds are on both
sides of 1, close where a good form is (1 to 5 %), wide where a constant for a request's time is.

Guard: a prediction of 0 counts as a ratio of 10; sums are finite for 1e300 rows. Merging adds.
"""

from __future__ import annotations

import numpy as np

from online.rows import Floats, Ints
from online.snapshot import ResidualSnapshot
from online.state import Finite, StateError, saved

RATIO_BOUNDS = (0.5, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 2.0)
_CLASSES = len(RATIO_BOUNDS) + 1
_LOG_BOUNDS = np.log(RATIO_BOUNDS)
_LOG_MAX = float(np.log(10.0))


class Residuals:
    """Of one target of one configuration."""

    STATE = saved("residuals", rows=Ints, ratio_sum=Finite)

    __slots__ = ("ratio_sum", "rows")

    def __init__(self) -> None:
        self.rows: Ints = np.zeros(_CLASSES, np.int64)
        self.ratio_sum = 0.0

    def learn(self, log_ratio: Floats) -> None:
        """Count log(y / yhat) of one block, (n,), finite."""
        counts = np.bincount(_LOG_BOUNDS.searchsorted(log_ratio), minlength=_CLASSES)
        if counts[-1]:
            log_ratio = np.minimum(log_ratio, _LOG_MAX)
        self.rows += counts
        self.ratio_sum += float(np.add.reduce(np.exp(log_ratio)))

    def add(self, other: Residuals) -> None:
        """Add the rows of another record to these."""
        self.rows += other.rows
        self.ratio_sum += other.ratio_sum

    def snapshot(self) -> ResidualSnapshot | None:
        """None before the first row that was predicted."""
        if not self.rows.any():
            return None
        return ResidualSnapshot(ratio_bounds=list(RATIO_BOUNDS), rows=self.rows.tolist(), ratio_sum=self.ratio_sum)

    def restored(self) -> None:
        """Take saved counts over; counts only grow."""
        if (self.rows < 0).any() or self.ratio_sum < 0.0:
            raise StateError("negative")
