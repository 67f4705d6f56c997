"""One target of one configuration: its partial blocks, its feature sets, its learners."""

from __future__ import annotations

from .history import ChangeKind, CoursePoint, HistoryView, StepHistory
from .settings import RLS, BankSettings, Learner, check_settings, feature_set, make_learner, make_rls
from .target_state import TargetState, merge_target, succeed_target

__all__ = [
    "RLS",
    "BankSettings",
    "ChangeKind",
    "CoursePoint",
    "HistoryView",
    "Learner",
    "StepHistory",
    "TargetState",
    "check_settings",
    "feature_set",
    "make_learner",
    "make_rls",
    "merge_target",
    "succeed_target",
]
