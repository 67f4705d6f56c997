"""Feature sets: tables of (name, unit, formula), evaluated per step and summed per row."""

from .columns import (
    ACTIVE_EXPERTS,
    INTERCEPT,
    PORTABLE,
    Column,
    Fact,
    Facts,
    FeatureSet,
    custom,
    experts_in,
    portable,
    share_touched,
)
from .systems import SYSTEMS, System, build, missing, registered

__all__ = [
    "ACTIVE_EXPERTS",
    "INTERCEPT",
    "PORTABLE",
    "SYSTEMS",
    "Column",
    "Fact",
    "Facts",
    "FeatureSet",
    "System",
    "build",
    "custom",
    "experts_in",
    "missing",
    "portable",
    "registered",
    "share_touched",
]
