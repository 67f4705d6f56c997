"""Which steps are sent: whole blocks of consecutive ones.

A step's cycle time is a difference between neighbours. Sampling single steps at rate r keeps r^2 of the differences;
sampling blocks of B keeps r * (B - 1) / B of them.
"""

from __future__ import annotations

import random
from typing import Final

BLOCK: Final = 64


class BlockSampler:
    """Decides per block of ``BLOCK`` steps, at random, so that no rhythm of the load can hide from it."""

    def __init__(self, rate: float, rng: random.Random) -> None:
        self._rate = rate
        self._rng = rng
        self._block = -1
        self._kept = False

    def keeps(self, step: int) -> bool:
        """Tell whether step (from 1, ascending) is sent."""
        if self._rate >= 1.0:
            return True
        block = (step - 1) // BLOCK
        if block != self._block:
            self._block = block
            self._kept = self._rng.random() < self._rate
        return self._kept
