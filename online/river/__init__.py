"""River's learners behind the same contract, and the corrector of what is published."""

from __future__ import annotations

from .challengers import LINEAR, PREFIX, QUANTILE, RiverLearner, make
from .context import CONTEXT
from .corrector import RESIDUAL, Corrector
from .quantile import QuantileLearner
from .seen_rows import SeenRows

__all__ = [
    "CONTEXT",
    "LINEAR",
    "PREFIX",
    "QUANTILE",
    "RESIDUAL",
    "Corrector",
    "QuantileLearner",
    "RiverLearner",
    "SeenRows",
    "make",
]
