"""The learner: decayed statistics, robust weights, solve, slow and fast member, identifiability."""

from __future__ import annotations

from .ard import ArdLearner
from .covariance_learner import CovarianceLearner
from .learner_report import donation
from .prior import Prior
from .rls_learner import LearnerSettings, RlsLearner
from .robust import middle
from .solve import solve

__all__ = [
    "ArdLearner",
    "CovarianceLearner",
    "LearnerSettings",
    "Prior",
    "RlsLearner",
    "donation",
    "middle",
    "solve",
]
