"""How well the coefficients predict rows they have not learned: relative errors, and what the rest scatters by."""

from __future__ import annotations

import numpy as np

from online.blocks import Design
from online.constants import TINY_US
from online.errors import Intervals, PrequentialError
from online.rows import Floats
from online.state import Stateful


class Scores(Stateful):
    """Of the published coefficients of one model.

    Attributes:
        error: prequential errors.
        intervals: of observed / predicted.
        learns_intervals: not where another prediction's are published (online/target/published_prediction.py).
    """

    SAVED = ("error", "intervals")

    def __init__(self) -> None:
        self.error, self.intervals = PrequentialError(), Intervals()
        self.learns_intervals = True

    def score(self, block: Design, prediction: Floats) -> Floats:
        """Count the errors of predictions (n,); log(y / prediction), (n,)."""
        ratio = np.maximum(prediction, TINY_US) / block.elapsed_us
        log_ratio: Floats = -np.log(ratio)
        self.error.learn(np.abs(ratio - 1.0))
        if self.learns_intervals:
            self.intervals.learn(block, log_ratio)
        return log_ratio

    def add(self, other: Scores) -> None:
        """Bands of both streams; nobody has predicted by the merged coefficients yet."""
        self.error = PrequentialError()
        self.intervals.add(other.intervals)
