"""Did the machine change: cells, detectors, the monitor."""

from __future__ import annotations

from .cells import Fit
from .detectors import DriftSettings, make_detector
from .monitor import DriftMonitor, Verdict

__all__ = [
    "DriftMonitor",
    "DriftSettings",
    "Fit",
    "Verdict",
    "make_detector",
]
