"""How far off: intervals, residuals, prequential error."""

from __future__ import annotations

from .prediction_intervals import Intervals, stratum_name
from .prequential import PrequentialError, binned
from .residuals import Residuals

__all__ = [
    "Intervals",
    "PrequentialError",
    "Residuals",
    "binned",
    "stratum_name",
]
