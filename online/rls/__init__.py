"""The learner: decayed statistics, robust weights, solve, identifiability."""

from __future__ import annotations

from .ard import RelevantMember
from .error_bars import JACKKNIFE_ROWS
from .identify import as_far_as_it_fits
from .learner_settings import LearnerSettings
from .merging import merge
from .operating_points import OperatingPoints, points_of
from .outliers import compared
from .prior import MORE, Prior, contradicted
from .replicas import Replica, joined, replica_of
from .rls_learner import RlsLearner
from .robust import middle
from .solve import solve
from .strata import RowWeights

__all__ = [
    "JACKKNIFE_ROWS",
    "MORE",
    "LearnerSettings",
    "OperatingPoints",
    "Prior",
    "RelevantMember",
    "Replica",
    "RlsLearner",
    "RowWeights",
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
