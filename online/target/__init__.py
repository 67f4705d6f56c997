"""One target of one configuration: its partial blocks, its feature sets, its learners."""

from __future__ import annotations

from .course import ChangeKind
from .learners import RLS, Learner, make_learner, make_rls
from .reading import Readings
from .settings import BankSettings, check_settings, feature_set
from .step_history import CoursePoint, HistoryView, StepHistory
from .target_merge import merge_target, succeed_target
from .target_state import TargetState

__all__ = [
    "RLS",
    "BankSettings",
    "ChangeKind",
    "CoursePoint",
    "HistoryView",
    "Learner",
    "Readings",
    "StepHistory",
    "TargetState",
    "check_settings",
    "feature_set",
    "make_learner",
    "make_rls",
    "merge_target",
    "succeed_target",
]
