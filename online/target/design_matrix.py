"""The columns of all feature sets of one target side by side.

    X = [X_1 | X_2 | ...]        X: (n, P), X_s: (n, p_s), the columns of set s in a slice of their own

Rows that are no measurement are left out and counted. A set that does not know a row's columns has NaN there; a row
that no set knows is left out too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from online.blocks import Design, strata_of
from online.constants import VALUE_MAX
from online.features import FeatureSet
from online.rows import Floats, Mask, RowBlock, RowOutcome, Target
from online.state import StateError, Tree

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
            x = np.concatenate([np.empty((len(rows), 0)), *(s.evaluate(rows) for s, _ in self.sets.values())], axis=1)
            good, outcome = self._sort_out(rows, x)
        stratum, cell = strata_of(self._target, rows)
        steps = rows.steps.astype(np.float64)
        design = Design(
            x, rows.phase, rows.elapsed_us, steps, rows.weight, stratum, cell, rows.end_ns, engine=rows.engine
        )
        return Evaluated(design if good.all() else design.take(good), outcome)

    def _sort_out(self, rows: RowBlock, x: Floats) -> tuple[Mask, Counter[RowOutcome]]:
        """Which rows can be learned, (n,), and what became of them."""
        y, weight = rows.elapsed_us, rows.weight
        finite = np.isfinite(y) & np.isfinite(weight) & np.isfinite(rows.phase).all(axis=1)
        positive = (y > 0.0) & (weight > 0.0)
        bounded = (y >= ELAPSED_US_MIN) & (y <= VALUE_MAX) & (weight <= VALUE_MAX) & (weight >= 1.0 / VALUE_MAX)
        bounded &= (np.abs(rows.phase) <= 1.0).all(axis=1)
        known = np.zeros(len(rows), np.bool_)
        for name, (_, where) in self.sets.items():
            here = np.isfinite(x[:, where]).all(axis=1)
            known |= here & (name in self._fitted)
            bounded &= (np.abs(x[:, where]) <= VALUE_MAX).all(axis=1) | ~here
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
        return left, +outcome

    def view(self, block: Design, name: str) -> Design:
        """The rows of a block that one set knows, with its columns only."""
        known = self.known(block, name)
        if not known.all():
            block = block.take(known)
        return replace(block, x=block.x[:, self.sets[name][1]], groups=block.groups)

    def known(self, block: Design, name: str) -> Mask:
        """Which rows of a block are in the view of a set, (n,)."""
        known: Mask = np.atleast_1d(np.isfinite(block.x[:, self.sets[name][1]]).all(axis=1))
        return known

    # ---------------------------------------------------------------- state

    def columns(self) -> dict[str, list[str]]:
        """Names of the columns by set."""
        return {name: list(features.names) for name, (features, _) in self.sets.items()}

    def rows_to_state(self, rows: Design | None) -> Tree | None:
        """Rows for the state file, with their columns by set."""
        if rows is None:
            return None
        return rows.to_state() | {"x": [[name, rows.x[:, where]] for name, (_, where) in self.sets.items()]}

    def rows_of_state(self, state: Tree | None, same: set[str]) -> Design | None:
        """Rows from the state file; of columns that are not the same there nothing is known: NaN."""
        if state is None:
            return None
        x, saved = np.full((len(state["elapsed_us"]), self.width), np.nan), dict(state["x"])
        for name in same:
            features, where = self.sets[name]
            if saved[name].shape != (len(x), len(features)):
                raise StateError(f"saved rows of {name}: {saved[name].shape}, expected {(len(x), len(features))}")
            x[:, where] = saved[name]
        return Design.of_state({**state, "x": x})
