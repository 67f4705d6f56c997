"""What a system is: tables of columns per target, made from a configuration's sheet.

A table is written once, with every column of its source. Its live form leaves out the columns that are constant within
one configuration, and those that are zero there (experts of a dense model, links of a single GPU): no data of that
configuration can say anything about their coefficients (algorithms: identifiability). Their values go into transfer:
with beta = (live, constant),

    x_live beta_live + sum_j k_j beta_j    k_j: value of the j-th constant column here    = intercept of the live form

so a live form has an intercept also where its source has none; unless its columns add up to one already (gates).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from online.features.columns import INTERCEPT, Column, FeatureSet, Raw
from online.features.registry import Facts, register
from online.features.sheets import Sheet, sheet_of
from online.rows import Floats, Target

Table = Callable[[Sheet | None], tuple[Column, ...] | None]
"""Columns of one target; None where the sheet lacks what the formulas need."""


Ties = Callable[[Floats, tuple[str, ...], tuple[str, ...], Mapping[str, float]], None]


@dataclass(frozen=True, slots=True)
class System:
    """One modelling system.

    Attributes:
        name: as configured.
        title: in one line.
        reference: where it is from.
        tables: per target.
        absent: features of the source that our telemetry cannot give, with the reason.
        ties: adjusts the map from full to live coefficients (:mod:`online.transfer`) in place: ``(m, live, full,
            constants)``; for coefficients that scale with a constant, or that two columns share.
        gated_intercepts: its columns hold an intercept in parts, weighed by gates that sum to 1; one more would be
            their sum.
    """

    name: str
    title: str
    reference: str
    tables: Mapping[Target, Table]
    absent: Mapping[str, str] = field(default_factory=dict)
    ties: Ties | None = None
    gated_intercepts: bool = False

    def table(self, target: Target, facts: Facts) -> tuple[Column, ...] | None:
        """All columns for a configuration, constant ones included; None where the system does not apply."""
        make = self.tables.get(target)
        return None if make is None else make(sheet_of(facts)[0])

    def live(self, target: Target, facts: Facts) -> FeatureSet | None:
        """The set that one configuration's rows can identify."""
        columns = self.table(target, facts)
        if columns is None:
            return None
        varying = tuple(c for c in columns if not c.constant)
        return FeatureSet(self.name, target, varying if self.gated_intercepts else with_intercept(varying))

    def register(self) -> None:
        """Make the live form available under the system's name."""
        register(self.name, self.live)


def column(
    name: str, formula: str | Callable[[Raw], Floats], reference: str, unit: str = "us", *, constant: bool = False
) -> Column:
    """One line of a table."""
    return Column(name, unit, formula, reference, constant=constant)


def constant(name: str, value: float, reference: str) -> Column:
    """A column with one value per configuration."""
    return Column(name, "us", lambda raw: np.full(len(raw), value), reference, constant=True)


def intercept(reference: str) -> Column:
    """What a step (or a request) costs however little it does."""
    return Column(INTERCEPT, "us", INTERCEPT, reference)


def with_intercept(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """Columns of a live form that has an intercept."""
    if any(c.formula == INTERCEPT for c in columns):
        return columns
    return (intercept("bias of the configuration, in place of the columns that are constant within it"), *columns)


def constant_values(columns: tuple[Column, ...]) -> dict[str, float]:
    """Value of each constant column in this configuration."""
    nothing = Raw(np.zeros((1, 0)), ())
    return {
        c.name: float(np.asarray(c.formula(nothing))[0])
        for c in columns
        if c.constant and not isinstance(c.formula, str)
    }


def full(system: System, target: Target, facts: Facts) -> tuple[tuple[Column, ...], dict[str, float]] | None:
    """All columns, and the values of the constant ones; None where the system does not apply."""
    columns = system.table(target, facts)
    return None if columns is None else (columns, constant_values(columns))


def tokens(raw: Raw) -> Floats:
    """T = P + D, tokens of a step."""
    return np.asarray(raw["prefill_tokens"] + raw["decode_tokens"])


def pairs(raw: Raw) -> Floats:
    """Query-key pairs of the step's prefills; P^2 / 2 nP (fresh, equal prompts) where nobody saw the chunks."""
    known, prefill = raw["prefill_attention"], raw["prefill_tokens"]
    return np.where(np.isnan(known), prefill * prefill / (2.0 * np.maximum(raw["prefill_requests"], 1.0)), known)


def usage(raw: Raw) -> Floats:
    """Share of the KV cache in use; 0 where nobody told: such a row is learned without it."""
    return np.nan_to_num(raw["kv_usage_ratio"])


def moved_blocks(raw: Raw, name: str) -> Floats:
    """KV blocks that were moved or evicted; 0 where no event was told."""
    return np.nan_to_num(raw[name])


def ratio(numerator: Floats, denominator: Floats) -> Floats:
    """0 where there is nothing to divide by: an empty step has no share of anything."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator != 0.0)
