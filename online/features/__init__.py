"""Feature sets: tables of (name, unit, formula), evaluated per step and summed per row."""

import online.features.systems  # noqa: F401  # registers them

from .columns import INTERCEPT, Column, FeatureSet, Raw
from .registry import Fact, Facts, build, custom, portable, registered

__all__ = [
    "INTERCEPT",
    "Column",
    "Fact",
    "Facts",
    "FeatureSet",
    "Raw",
    "build",
    "custom",
    "portable",
    "registered",
]
