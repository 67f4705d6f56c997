"""Feature sets: tables of (name, unit, formula), evaluated per step and summed per row."""

import online.features.systems  # noqa: F401  # registers them

from .columns import (
    ACTIVE_EXPERTS,
    INTERCEPT,
    Column,
    Fact,
    Facts,
    FeatureSet,
    Raw,
    build,
    custom,
    experts_in,
    portable,
    registered,
    share_touched,
)

__all__ = [
    "ACTIVE_EXPERTS",
    "INTERCEPT",
    "Column",
    "Fact",
    "Facts",
    "FeatureSet",
    "Raw",
    "build",
    "custom",
    "experts_in",
    "portable",
    "registered",
    "share_touched",
]
