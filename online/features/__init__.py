"""Feature sets: tables of (name, unit, formula), evaluated per step and summed per row."""

import online.features.systems  # noqa: F401  # registers them

from .columns import INTERCEPT, Column, FeatureSet, sum_steps
from .registry import Fact, Facts, build, custom, portable, registered

__all__ = [
    "INTERCEPT",
    "Column",
    "Fact",
    "Facts",
    "FeatureSet",
    "build",
    "custom",
    "portable",
    "registered",
    "sum_steps",
]
