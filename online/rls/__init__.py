"""The learner: decayed statistics, robust weights, solve, error bars."""

from __future__ import annotations

from .ard import RelevantFit
from .error_bars import JACKKNIFE_ROWS
from .identify import IDENTIFIED_ERROR, VIF_MAX, as_far_as_it_fits
from .learner import LearnerSettings, RlsLearner
from .merging import Replica, compared, joined, merge, replica_of
from .prior import Prior, contradicted
from .solve import solve
from .strata import OperatingPoints, points_of
from .weights import bisquare, middle

__all__ = [
    "IDENTIFIED_ERROR",
    "JACKKNIFE_ROWS",
    "VIF_MAX",
    "LearnerSettings",
    "OperatingPoints",
    "Prior",
    "RelevantFit",
    "Replica",
    "RlsLearner",
    "as_far_as_it_fits",
    "bisquare",
    "compared",
    "contradicted",
    "joined",
    "merge",
    "middle",
    "points_of",
    "replica_of",
    "solve",
]
