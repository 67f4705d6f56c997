"""River's models: the residual model of the published prediction, and regressors that learn beside ``rls``."""

from __future__ import annotations

from .challengers import PREFIX, RiverLearner, make
from .residual import CONTEXT, RESIDUAL, ResidualModel

__all__ = ["CONTEXT", "PREFIX", "RESIDUAL", "ResidualModel", "RiverLearner", "make"]
