"""Did the machine change: the sequential test, and the engines that must agree."""

from __future__ import annotations

from .change import ChangeMonitor, Speed, Verdict, make_alarm
from .engines import ENGINES_MAX, differs

__all__ = ["ENGINES_MAX", "ChangeMonitor", "Speed", "Verdict", "differs", "make_alarm"]
