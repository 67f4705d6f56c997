"""Feature sets: tables of (name, unit, formula), evaluated per step and summed per row."""

from online.features.systems import SYSTEMS, System

from .columns import INTERCEPT, UNITS, Column, FeatureSet, Raw, raw_column, sum_steps
from .registry import Fact, Factory, Facts, build, custom, portable, register, registered

__all__ = [
    "INTERCEPT",
    "SYSTEMS",
    "UNITS",
    "Column",
    "Fact",
    "Factory",
    "Facts",
    "FeatureSet",
    "Raw",
    "System",
    "build",
    "custom",
    "portable",
    "raw_column",
    "register",
    "registered",
    "sum_steps",
]
