"""One target of one configuration: its partial blocks, its feature sets, its learners."""

from __future__ import annotations

from .history import HistoryView
from .settings import BankSettings, check_settings, feature_set
from .target_state import TargetState

__all__ = [
    "BankSettings",
    "HistoryView",
    "TargetState",
    "check_settings",
    "feature_set",
]
