"""Whether shape factors are applied: for as long as they do not predict worse than none.

    a = |x beta / y - 1|    b = |x beta F / y - 1|          of each row, before it is learned
    A = sum clip(a - b, -0.05, 0.05)                        what the factors have won
    B = sum min(a, 0.2)                                     of what there was to win
    left out where A < -0.05 B, applied again where A >= 0; decided after 256 rows, not while a change is on trial

Sums are forgotten with a half-life of 1024 rows. A factor is the mean of its shape's rows, and where a good part of
them stalls that is a time which hardly any step takes: beta leaves out what F counts, and is the better alone. Errors
are counted up to a bound, so that what predicts most rows wins. Factors are learned either way.

Guarantee: log ratios within 700 give finite sums, |A| <= 0.05 n and 0 <= B <= 0.2 n; n, the rows remembered, is below
1478 and those of a block. Sums of several are added, which is commutative and associative, as is what they decide.
Reference: Dawid, Present position and potential developments: the prequential approach (JRSS A 147, 1984).
"""

from __future__ import annotations

import numpy as np

from online.rows import Floats
from online.state import Count, Finite, saved

_ROWS_MIN = 256
_HALF_LIFE_ROWS = 1024.0
_WON_MAX, _ERROR_MAX = 0.05, 0.2
_LOST = 0.05
"""By so much another model is better before it becomes champion, too."""


class FactorUse:
    """Of the shape factors of one target.

    Attributes:
        applied: whether x beta is multiplied by them.
        rows: how many were scored.
        won, error: A and B.
    """

    STATE = saved("factor_use", applied=bool, rows=Count, won=Finite, error=Finite)

    __slots__ = ("applied", "error", "rows", "won")

    def __init__(self) -> None:
        self.applied = True
        self.rows = 0
        self.won = self.error = 0.0

    def score(self, log_ratio: Floats, log_factor: Floats) -> None:
        """Rows not yet learned: log(y / x beta) and log F of each, (n,)."""
        plain = np.abs(np.expm1(-log_ratio))
        won = plain - np.abs(np.expm1(log_factor - log_ratio))
        keep = 0.5 ** (len(log_ratio) / _HALF_LIFE_ROWS)
        self.won = keep * self.won + float(np.minimum(np.maximum(won, -_WON_MAX), _WON_MAX).sum())
        self.error = keep * self.error + float(np.minimum(plain, _ERROR_MAX).sum())
        self.rows += len(log_ratio)
        self._decide()

    def _decide(self) -> None:
        if self.rows >= _ROWS_MIN:
            self.applied = self.won >= (-_LOST * self.error if self.applied else 0.0)

    def add(self, other: FactorUse) -> None:
        """Rows of both; applied unless both together have lost by them, whatever each did: sums have no order."""
        self.won += other.won
        self.error += other.error
        self.rows += other.rows
        self.applied = True
        self._decide()
