"""How far off: intervals, residuals, prequential error."""

from __future__ import annotations

from .prediction_intervals import Intervals, stratum_name
from .prequential import PrequentialError, binned
from .recent_rows import PredictedRows, RecentRows
from .residuals import Residuals
from .shaped_prediction import ShapedPrediction, cell_name
from .tiles import Tiles

__all__ = [
    "Intervals",
    "PredictedRows",
    "PrequentialError",
    "RecentRows",
    "Residuals",
    "ShapedPrediction",
    "Tiles",
    "binned",
    "cell_name",
    "stratum_name",
]
