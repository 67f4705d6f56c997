"""The learner: decayed statistics, robust weights, solve, error bars."""

from __future__ import annotations

from .error_bars import IDENTIFIED_ERROR, JACKKNIFE_ROWS, VIF_MAX, as_far_as_it_fits
from .learner import RlsLearner
from .merging import Replica, compared, joined, merge
from .solve import Prior, bisquare, contradicted, solve
from .strata import points_of

__all__ = [
    "IDENTIFIED_ERROR",
    "JACKKNIFE_ROWS",
    "VIF_MAX",
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
