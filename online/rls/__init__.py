"""The learner: decayed statistics, robust weights, solve, error bars."""

from __future__ import annotations

from .error_bars import IDENTIFIED_ERROR, VIF_MAX, doubt_identified
from .learner import RlsLearner
from .merging import Replica, compare_replicas, join_replicas, merge
from .solve import Prior, bisquare, is_contradicted, solve
from .strata import points_of

__all__ = [
    "IDENTIFIED_ERROR",
    "VIF_MAX",
    "Prior",
    "Replica",
    "RlsLearner",
    "bisquare",
    "compare_replicas",
    "doubt_identified",
    "is_contradicted",
    "join_replicas",
    "merge",
    "points_of",
    "solve",
]
