"""The columns of all feature sets of one target side by side.

    X = [X_1 | X_2 | ...]        X: (n, P), X_s: (n, p_s), the columns of set s in a slice of their own

Rows that are no measurement are left out and counted. A set that does not know a row's columns has NaN there; a row
that no set knows is left out too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from online.blocks import Design, strata_of
from online.constants import VALUE_MAX
from online.features import FeatureSet
from online.rows import Floats, Mask, RowBlock, RowOutcome, Target
from online.state import StateError

# Derived: a nanosecond, the grain of every clock; a shorter time is no measurement.
ELAPSED_US_MIN = 1e-3


class Evaluated(NamedTuple):
    """Rows that can be learned, and what became of all."""

    design: Design
    outcome: Counter[RowOutcome]


class DesignMatrix:
    """Which set has which columns.

    Attributes:
        sets: feature sets by name, with the columns of the design each has.
        width: columns P.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.sets: dict[str, tuple[FeatureSet, slice]] = {}
        self.width = 0
        self._fitted: set[str] = set()

    def add(self, features: FeatureSet, *, fitted: bool = True) -> None:
        """Append a set's columns; a row is known if a set knows it that models are ``fitted`` to."""
        if fitted:
            self._fitted.add(features.name)
        self.sets[features.name] = (features, slice(self.width, self.width + len(features)))
        self.width += len(features)

    def evaluate(self, rows: RowBlock) -> Evaluated:
        """The rows that can be learned, and what became of all."""
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            parts = [features.evaluate(rows) for features, _ in self.sets.values()]
            x = parts[0] if len(parts) == 1 else np.concatenate([np.empty((len(rows), 0)), *parts], axis=1)
            complete = bool(self._fitted) and _measured(rows) and bool(np.abs(x).max(initial=0.0) <= VALUE_MAX)
            if complete:
                good, outcome = None, Counter({RowOutcome.LEARNED: len(rows)})
            else:
                good, outcome, complete = self._sort_out(rows, x)
        if not outcome[RowOutcome.LEARNED]:  # as of every target for which no set is configured
            return Evaluated(Design.empty(self.width), outcome)
        stratum, cell = strata_of(self._target, rows)
        steps = rows.steps.astype(np.float64)
        design = Design(
            x, rows.phase, rows.elapsed_us, steps, rows.weight, stratum, cell, rows.end_ns, complete, engine=rows.engine
        )
        return Evaluated(design if good is None else design.take(good), outcome)

    def _sort_out(self, rows: RowBlock, x: Floats) -> tuple[Mask | None, Counter[RowOutcome], bool]:
        """Which rows can be learned, (n,), None for all; what became of them, and whether every set knows every row."""
        y, weight = rows.elapsed_us, rows.weight
        finite = np.isfinite(y) & np.isfinite(weight) & np.isfinite(rows.phase).all(axis=1)
        positive = (y > 0.0) & (weight > 0.0)
        bounded = (y >= ELAPSED_US_MIN) & (y <= VALUE_MAX) & (weight <= VALUE_MAX) & (weight >= 1.0 / VALUE_MAX)
        bounded &= (np.abs(rows.phase) <= 1.0).all(axis=1)
        known, complete = np.zeros(len(rows), np.bool_), True
        for name, (_, where) in self.sets.items():
            inside = (np.abs(x[:, where]) <= VALUE_MAX).all(axis=1)
            here = np.isfinite(x[:, where]).all(axis=1)
            known |= here & (name in self._fitted)
            bounded &= inside | ~here
            complete &= bool(inside.all())
        outcome, left = Counter[RowOutcome](), np.ones(len(rows), np.bool_)
        for reason, passes in (
            (RowOutcome.NOT_FINITE, finite),
            (RowOutcome.NOT_POSITIVE, positive),
            (RowOutcome.OUT_OF_RANGE, bounded),
            (RowOutcome.UNKNOWN_FEATURE, known),
        ):
            outcome[reason] = int(np.count_nonzero(left & ~passes))
            left &= passes
        outcome[RowOutcome.LEARNED] = int(np.count_nonzero(left))
        return None if left.all() else left, outcome, complete

    def view(self, block: Design, name: str) -> Design:
        """The rows of a block that one set knows, with its columns only."""
        x, groups = block.x[:, self.sets[name][1]], block.groups
        if not block.complete and not (known := self.known(block, name)).all():
            block, x, groups = block.take(known), x[known], None
        return replace(block, x=x, groups=groups)

    def known(self, block: Design, name: str) -> Mask:
        """Which rows of a block are in the view of a set, (n,)."""
        known: Mask = np.atleast_1d(np.isfinite(block.x[:, self.sets[name][1]]).all(axis=1))
        return known

    def layout(self) -> list[tuple[str, list[str]]]:
        """Names of all columns by set, in their order, for the state file."""
        return [(features.name, list(features.names)) for features, _ in self.sets.values()]

    def same_columns(self, saved: Sequence[tuple[str, list[str]]]) -> tuple[dict[str, slice], int]:
        """Where a saved design of these sets has the columns of today's sets; and its width."""
        same: dict[str, slice] = {}
        mine = dict(self.layout())
        start = 0
        for name, columns in saved:
            if mine.get(name) == columns:
                same[name] = slice(start, start + len(columns))
            start += len(columns)
        return same, start

    def rearranged(self, waiting: Design, same: dict[str, slice], width: int) -> Design:
        """A saved design of ``width`` columns with today's columns; what it does not know is NaN."""
        if waiting.x.shape[1] != width:
            raise StateError(f"saved rows of {waiting.x.shape[1]} columns, expected {width}")
        x = np.full((len(waiting), self.width), np.nan)
        for name, where in same.items():
            x[:, self.sets[name][1]] = waiting.x[:, where]
        waiting.x = x
        return waiting


def _measured(rows: RowBlock) -> bool:
    """Whether every row's time, weight and phase are a measurement's; what is not finite is within no bounds."""
    y, weight, phase = rows.elapsed_us, rows.weight, rows.phase
    return bool(
        len(y) > 0
        and y.min() >= ELAPSED_US_MIN
        and y.max() <= VALUE_MAX
        and weight.min() >= 1.0 / VALUE_MAX
        and weight.max() <= VALUE_MAX
        and np.abs(phase).max(initial=0.0) <= 1.0
    )
