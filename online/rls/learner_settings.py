"""Bounds and rates of one learner; what each of them does stands in the module that uses it."""

from __future__ import annotations

from typing import Self

import msgspec


class LearnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The half-life in steps, shares as ratios; a copy of what holds it copies the reference."""

    half_life_steps: float = 4000.0
    start_rows: int = 256
    alarm_keep: float = 0.02
    river_rows_per_s: float = 32.0
    detector: str = "cusum"

    def __deepcopy__(self, _memo: object) -> Self:
        return self
