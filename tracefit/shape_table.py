"""Factor and band of every batch shape of one target, by whole numbers."""

from __future__ import annotations

from .document import Target
from .shapes import cell_of_class, stratum_name

STRIDE = 64  # more than there are classes of prefill tokens
_ENTRIES_MAX = 65536
Shape = tuple[float, float, float]
Band = tuple[float, float, float]
"""Microseconds in the middle, below and above."""


class ShapeTable(dict[int, Shape]):
    """Factor, p10 and p90 by requests · 64 + class of prefill tokens; looked up by name once, bounded."""

    __slots__ = ("_by_octave", "_factors", "_pooled", "_strata")

    def __init__(self, target: Target) -> None:
        super().__init__()
        interval = target.interval
        self._factors = target.factors
        self._pooled = (1.0, 1.0) if interval is None else interval.pooled
        self._strata = {} if interval is None else interval.strata
        self._by_octave: dict[int, Shape] = {}

    def __missing__(self, key: int) -> Shape:
        requests, tokens_class = divmod(key, STRIDE)
        if len(self) >= _ENTRIES_MAX:
            self.clear()
        if not tokens_class:
            self[key] = found = self._named(0, requests)
            return found
        octave = requests.bit_length() * STRIDE + tokens_class  # with prefill all of an octave are one shape
        known = self._by_octave.get(octave)
        if known is None:
            known = self._by_octave[octave] = self._named(tokens_class, requests)
        self[key] = known
        return known

    def _named(self, tokens_class: int, requests: int) -> Shape:
        p10, p90 = self._strata.get(stratum_name(tokens_class, requests), self._pooled)
        factor = self._factor(cell_of_class(tokens_class, requests)) if self._factors else 1.0
        return factor, min(p10, 1.0), max(p90, 1.0)

    def _factor(self, cell: str) -> float:
        return self._factors.get(cell, 1.0)
