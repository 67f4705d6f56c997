"""The learner: decayed statistics, robust weights, solve, identifiability."""

from __future__ import annotations

from .ard import RelevantMember
from .error_bars import JACKKNIFE_ROWS
from .identify import IDENTIFIED_ERROR, VIF_MAX, as_far_as_it_fits
from .learner_settings import LearnerSettings
from .merging import merge
from .operating_points import OperatingPoints, points_of
from .prior import Prior, contradicted
from .replicas import Replica, compared, joined, replica_of
from .rls_learner import RlsLearner
from .robust import middle
from .solve import solve

__all__ = [
    "IDENTIFIED_ERROR",
    "JACKKNIFE_ROWS",
    "VIF_MAX",
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
]
