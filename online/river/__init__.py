"""River's models: the residual model of the published prediction, and regressors that learn beside ``rls``."""

from __future__ import annotations

from .challengers import LINEAR, PREFIX, QUANTILE, RiverLearner, make
from .quantile import QuantileLearner
from .residual import CONTEXT, RESIDUAL, ResidualModel

__all__ = [
    "CONTEXT",
    "LINEAR",
    "PREFIX",
    "QUANTILE",
    "RESIDUAL",
    "QuantileLearner",
    "ResidualModel",
    "RiverLearner",
    "make",
]
