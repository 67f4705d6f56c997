"""River's learners behind the same contract, and the corrector of what is published."""

from __future__ import annotations

from .challengers import LINEAR, PREFIX, QUANTILE, RiverLearner, make
from .context import CONTEXT, Context
from .corrector import RESIDUAL, Corrector
from .quantile import QuantileLearner

__all__ = [
    "CONTEXT",
    "LINEAR",
    "PREFIX",
    "QUANTILE",
    "RESIDUAL",
    "Context",
    "Corrector",
    "QuantileLearner",
    "RiverLearner",
    "make",
]
