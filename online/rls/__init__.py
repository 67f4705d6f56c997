"""The learner: decayed statistics, robust weights, solve, identifiability."""

from __future__ import annotations

from .ard import RelevantMember
from .covariance_learner import CovarianceLearner
from .identify import as_far_as_it_fits
from .jackknife import ROWS_MAX as JACKKNIFE_ROWS
from .jackknife import with_jackknife
from .learner_settings import LearnerSettings
from .merging import merge
from .operating_points import OperatingPoints, points_of
from .prior import Prior, contradicted
from .replicas import Replica, compared, joined, replica_of
from .rls_learner import RlsLearner
from .robust import middle
from .solve import solve

__all__ = [
    "JACKKNIFE_ROWS",
    "CovarianceLearner",
    "LearnerSettings",
    "OperatingPoints",
    "Prior",
    "RelevantMember",
    "Replica",
    "RlsLearner",
    "as_far_as_it_fits",
    "compared",
    "contradicted",
    "joined",
    "merge",
    "middle",
    "points_of",
    "replica_of",
    "solve",
    "with_jackknife",
]
