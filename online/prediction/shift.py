"""How much another prediction differs from the one whose errors were counted: yhat' = rho yhat.

rho over the rows has mean m and standard deviation d, and is taken as m - d for half of the rows and m + d for the
other half: exact for the mean of rho and of its square. Guard: rho is at least 1e-6.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from online.rows import Floats

_LEAST = 1e-6


class Shift(NamedTuple):
    """Mean and standard deviation of rho; by default there is none."""

    mean: float = 1.0
    sd: float = 0.0

    @staticmethod
    def of(factors: Floats, weight: Floats) -> Shift:
        """Of factors (n,) with weights (n,)."""
        total = float(weight.sum())
        if not total > 0.0:
            return Shift()
        mean = float(weight @ factors) / total
        return Shift(mean, float(np.sqrt(weight @ (factors - mean) ** 2 / total)))

    @property
    def factors(self) -> tuple[float, float]:
        """The two values of rho."""
        return max(self.mean - self.sd, _LEAST), max(self.mean + self.sd, _LEAST)
