"""One target of one configuration: its partial blocks, its feature sets, its learners."""

from __future__ import annotations

from .learners import Learner, make_learner, make_rls
from .settings import CUSTOM, BankSettings, check_settings
from .target_merge import merge_target
from .target_state import SavedTarget, TargetState

__all__ = [
    "CUSTOM",
    "BankSettings",
    "Learner",
    "SavedTarget",
    "TargetState",
    "check_settings",
    "make_learner",
    "make_rls",
    "merge_target",
]
