"""River's learners behind the same contract."""

from __future__ import annotations

from .challengers import PREFIX, QUANTILE, RESIDUAL, ResidualLearner, RiverLearner, make
from .quantile import QuantileLearner

__all__ = [
    "PREFIX",
    "QUANTILE",
    "RESIDUAL",
    "QuantileLearner",
    "ResidualLearner",
    "RiverLearner",
    "make",
]
