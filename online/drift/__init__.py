"""Did the machine change: cells, detectors, the monitor."""

from __future__ import annotations

from .cells import SpeedFit
from .detectors import DriftSettings, make_detector
from .monitor import DriftMonitor, Speed, Verdict

__all__ = [
    "DriftMonitor",
    "DriftSettings",
    "Speed",
    "SpeedFit",
    "Verdict",
    "make_detector",
]
