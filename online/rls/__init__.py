"""The learner: decayed statistics, robust weights, solve, error bars."""

from __future__ import annotations

from .diagnosis import IDENTIFIED_ERROR, VIF_MAX, as_far_as_it_fits
from .error_bars import JACKKNIFE_ROWS
from .learner import RlsLearner
from .merging import Replica, compared, joined, merge
from .solve import Prior, contradicted, solve
from .strata import OperatingPoints, points_of
from .weights import bisquare

__all__ = [
    "IDENTIFIED_ERROR",
    "JACKKNIFE_ROWS",
    "VIF_MAX",
    "OperatingPoints",
    "Prior",
    "Replica",
    "RlsLearner",
    "as_far_as_it_fits",
    "bisquare",
    "compared",
    "contradicted",
    "joined",
    "merge",
    "points_of",
    "solve",
]
