"""Did the machine change: cells, detectors, the monitor."""

from __future__ import annotations

from .cells import SpeedFit
from .detectors import NO_DETECTOR, DriftSettings, make_detector
from .engines import ENGINES_MAX, differs
from .medians import median_of
from .monitor import DriftMonitor, Speed, Verdict

__all__ = [
    "ENGINES_MAX",
    "NO_DETECTOR",
    "DriftMonitor",
    "DriftSettings",
    "Speed",
    "SpeedFit",
    "Verdict",
    "differs",
    "make_detector",
    "median_of",
]
