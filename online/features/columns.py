"""Feature sets: what a coefficient multiplies.

A column is a formula over the raw vocabulary of a target, evaluated per step and then summed over the steps of a row:

    X[i, j] = sum over the steps k of row i of formula_j(raw[k])          X: (n, p)

so a hinge, an indicator or a square is right for a row of one step and for a row of fifty. A formula is the name of a
raw column, the word ``intercept`` (1 per step: an intercept of an interval of l steps is l), or a function of the raw
columns by name. A raw value that is not known is NaN and makes x NaN: such rows are skipped by this set and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from online.rows import REQUEST_UNITS, STEP_UNITS, Floats, RowBlock, Target

INTERCEPT = "intercept"
"""The formula that is 1 in every step."""

UNITS = {INTERCEPT: "us", **STEP_UNITS, **REQUEST_UNITS}
"""Unit of the coefficient of each raw column."""

Raw = Mapping[str, Floats]
"""The raw columns of a block by name, (m,) each."""
Formula = str | Callable[[Raw], Floats]


@dataclass(frozen=True, slots=True)
class Column:
    """One feature.

    ``unit`` is its coefficient's, ``definition`` the formula in words. ``constant``: its value where that is the same
    in every step of one configuration: no single configuration can tell the coefficient from the intercept, so it
    serves transfer between configurations and is in no live set.
    """

    name: str
    unit: str
    formula: Formula
    definition: str = ""
    constant: float | None = None


def raw_column(name: str) -> Column:
    """The column that is a raw value, or the intercept, with the unit of the vocabulary."""
    return Column(name, UNITS.get(name, ""), name, name)


@dataclass(frozen=True)
class FeatureSet:
    """A named list of columns for one target; a copy of what holds it copies the reference.

    Raises:
        ValueError: on a repeated column name or a raw name outside the target's vocabulary.
    """

    name: str
    target: Target
    columns: tuple[Column, ...]

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    def __post_init__(self) -> None:
        """Refuse at construction what could only fail later."""
        names, known, where = self.names, (*self.target.vocabulary, INTERCEPT), f"set {self.name!r} for {self.target}"
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"feature {where}: column names must be unique, got {names}")
        for column in self.columns:
            if isinstance(column.formula, str) and column.formula not in known:
                raise ValueError(f"feature {where}: {column.formula!r} is not one of {', '.join(known)}")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Column names, in the order of the coefficients."""
        return tuple(column.name for column in self.columns)

    def __len__(self) -> int:
        """Number of columns p."""
        return len(self.columns)

    def evaluate(self, block: RowBlock) -> Floats:
        """X of shape (n, p): per step, then summed over the steps of each row. NaN where a raw value is not known."""
        raw = dict(zip(self.target.vocabulary, block.raw.T, strict=False))
        lines = np.empty((len(block.raw), len(self.columns)))
        for j, column in enumerate(self.columns):
            if column.formula == INTERCEPT:
                lines[:, j] = 1.0
            else:
                lines[:, j] = raw[column.formula] if isinstance(column.formula, str) else column.formula(raw)
        if block.single:
            return lines
        return np.asarray(np.add.reduceat(lines, block.offsets[:-1], axis=0), dtype=np.float64)


Fact = str | int | float | bool
Facts = Mapping[str, Fact]

_PORTABLE: dict[Target, tuple[str, ...]] = {
    Target.STEP_TIME: (INTERCEPT, "prefill_tokens", "decode_context_tokens", "requests"),
    Target.GPU_TIME: (INTERCEPT, "prefill_tokens", "decode_context_tokens", "requests"),
    Target.SCHEDULE_TIME: (INTERCEPT, "requests", "prefill_requests"),
    Target.API_QUEUEING: (INTERCEPT, "prompt_tokens"),
    Target.QUEUE_WAIT: (INTERCEPT, "waiting", "prompt_tokens"),
    Target.POST_DECODE: (INTERCEPT, "output_tokens"),
    Target.FIRST_RESPONSE: (INTERCEPT,),
    Target.PREEMPTION_GAP: (INTERCEPT,),
}

PORTABLE = "portable"
"""The set that every consumer understands."""
ACTIVE_EXPERTS = "active_experts"
"""Share of the experts of a layer that a step's tokens touch; its coefficient is the time that all of them take."""


def portable(target: Target, facts: Facts | None = None) -> FeatureSet:
    """The set that needs no data sheet and exists for every target.

    Step times of a mixture of experts have ``active_experts`` as well, where its experts are known.
    """
    columns = tuple(raw_column(name) for name in _PORTABLE[target])
    if target is Target.STEP_TIME and (experts := experts_in(facts or {})) is not None:

        def touched(raw: Raw) -> Floats:
            return np.asarray(share_touched(*experts, raw["prefill_tokens"] + raw["decode_tokens"]))

        columns = (*columns, Column(ACTIVE_EXPERTS, "us", touched, "1 - (1 - k/E)^tokens"))
    return FeatureSet(PORTABLE, target, columns)


def experts_in(facts: Facts) -> tuple[int, int] | None:
    """Experts of a layer, and how many of them a token goes through; None for a dense model or where one is unknown."""
    experts, per_token = facts.get("num_experts"), facts.get("num_experts_per_tok")
    if type(experts) is not int or type(per_token) is not int:
        return None
    is_mixture = 0 < per_token < experts and facts.get("num_moe_layers") != 0
    return (experts, per_token) if is_mixture else None


def share_touched(experts: int, per_token: int, tokens: Floats | float) -> Floats | float:
    """1 - (1 - k/E)^tokens: the share of E experts that are touched if each token picks its k at random."""
    return 1.0 - np.power(1.0 - per_token / experts, np.maximum(tokens, 0.0))


def custom(target: Target, names: Sequence[str]) -> FeatureSet:
    """Raw columns by name, from the configuration; ``intercept`` is one of them only if it is listed.

    Raises:
        ValueError: if a name is not in the target's vocabulary.
    """
    return FeatureSet("custom", target, tuple(raw_column(name) for name in names))
