"""Plain means of features and times, which no robust weight touches.

    sums <- 2^(-sum l weight / 4000) sums + sum_i z_i         z = [x, phase, y, l], sums: (q,)

sum y / sum l is the mean time of a step (of a request), stalls included; sum y / (sum x beta) is how much of it the
robust fit leaves out.
"""

from __future__ import annotations

import numpy as np

from online.rows import Floats
from online.state import Stateful


class Means(Stateful):
    """Sums of q augmented columns.

    Attributes:
        sums: decayed sums of z, (q,).
    """

    SAVED = ("sums",)

    __slots__ = ("_half_life_steps", "sums")

    def __init__(self, q: int, half_life_steps: float) -> None:
        self._half_life_steps = half_life_steps
        self.sums = np.zeros(q)

    def learn(self, z: Floats, weighted_steps: float) -> None:
        """Add rows z (n, q) that tell of so many steps."""
        self.sums = self.sums * 2.0 ** -(weighted_steps / self._half_life_steps) + z.sum(axis=0)

    def discount(self, keep: float, gain: float) -> None:
        """Keep this share of all sums, and say that the same work takes ``gain`` times as long."""
        self.sums *= keep
        self.sums[-2] *= gain

    def widen(self, at: int, more: int) -> None:
        """Sums of ``more`` columns, never seen, before column ``at``."""
        self.sums = np.concatenate([self.sums[:at], np.zeros(more), self.sums[at:]])

    def add(self, other: Means) -> None:
        """Add the sums of another record to these."""
        self.sums = self.sums + other.sums

    def per_step(self) -> Floats | None:
        """Mean of each column per step (per request), (q,); None before any row."""
        return self.sums / self.sums[-1] if self.sums[-1] > 0.0 else None

    def factor(self, beta: Floats) -> float | None:
        """Mean time per robustly predicted time, beta (p,); None where nothing is predicted."""
        predicted = float(self.sums[: len(beta)] @ beta)
        return float(self.sums[-2]) / predicted if predicted > 0.0 else None
