"""Feature sets: what a coefficient multiplies.

A column is a formula over the raw vocabulary of a target, evaluated per step and then summed over the steps of a row:

    X[i, j] = sum over the steps k of row i of formula_j(raw[k])          X: (n, p)

so a hinge, an indicator or a square is right for a row of one step and for a row of fifty. A formula is the name of a
raw column, the word ``intercept`` (1 per step: an intercept of an interval of l steps is l), or a function of
:class:`Raw`. A raw value that is not known is NaN and makes x NaN: such rows are skipped by this set and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from online.rows import Floats, RowBlock, Target

INTERCEPT = "intercept"
"""The formula that is 1 in every step."""

UNITS: dict[str, str] = {
    INTERCEPT: "us",
    "prefill_tokens": "us/token",
    "prefill_requests": "us/request",
    "decode_requests": "us/request",
    "decode_tokens": "us/token",
    "decode_context_tokens": "us/token",
    "prefill_attention": "us/token^2",
    "requests": "us/request",
    "running": "us/request",
    "waiting": "us/request",
    "preempted": "us/request",
    "finished": "us/request",
    "kv_usage_ratio": "us",
    "kv_blocks_used": "us/block",
    "offload_blocks": "us/block",
    "restore_blocks": "us/block",
    "evicted_blocks": "us/block",
    "prompt_tokens": "us/token",
    "output_tokens": "us/token",
    "queued_tokens": "us/token",
}
"""Unit of the coefficient of each raw column."""


class Raw:
    """The raw lines of a block by column name: ``raw["requests"]`` is a float64 array of shape (m,)."""

    __slots__ = ("_index", "_lines")

    def __init__(self, lines: Floats, vocabulary: Sequence[str]) -> None:
        self._lines = lines
        self._index = {name: column for column, name in enumerate(vocabulary)}

    def __getitem__(self, name: str) -> Floats:
        """One raw column; KeyError for a name outside the vocabulary."""
        return self._lines[:, self._index[name]]

    def __len__(self) -> int:
        """Number of lines m."""
        return len(self._lines)


Formula = str | Callable[[Raw], Floats]


@dataclass(frozen=True, slots=True)
class Column:
    """One feature.

    Attributes:
        name: as published.
        unit: of its coefficient.
        formula: raw column name, ``intercept``, or a function of :class:`Raw`.
        reference: where the definition comes from (a paper, a data sheet, a contract), for the documentation.
        constant: the same in every step of one configuration: no single configuration can tell its coefficient from
            the intercept, so it serves transfer between configurations only and is not part of a live set.
    """

    name: str
    unit: str
    formula: Formula
    reference: str = ""
    constant: bool = False


def raw_column(name: str, reference: str = "") -> Column:
    """The column that is a raw value, or the intercept, with the unit of the vocabulary."""
    return Column(name, UNITS[name], name, reference)


@dataclass(frozen=True, slots=True)
class FeatureSet:
    """A named list of columns for one target; a copy of what holds it copies the reference.

    Raises:
        ValueError: on a repeated column name or a raw name outside the target's vocabulary.
    """

    name: str
    target: Target
    columns: tuple[Column, ...]
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Column names, in the order of the coefficients."""
    _places: NDArray[np.intp] | None = field(init=False, repr=False, compare=False)
    """Of each column in the raw lines, where all are raw columns or the intercept, whose place is any."""

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    def __post_init__(self) -> None:
        """Refuse at construction what could only fail later."""
        names = tuple(column.name for column in self.columns)
        object.__setattr__(self, "names", names)
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"feature set {self.name!r} for {self.target}: column names must be unique, got {names}")
        for column in self.columns:
            known = (*self.target.vocabulary, INTERCEPT)
            if isinstance(column.formula, str) and column.formula not in known:
                raise ValueError(
                    f"feature set {self.name!r} for {self.target}: {column.formula!r} is not one of {', '.join(known)}"
                )
        vocabulary, formulas = self.target.vocabulary, [column.formula for column in self.columns]
        places = [vocabulary.index(each) if each != INTERCEPT else 0 for each in formulas if isinstance(each, str)]
        object.__setattr__(self, "_places", np.array(places, np.intp) if len(places) == len(formulas) else None)

    def __len__(self) -> int:
        """Number of columns p."""
        return len(self.columns)

    def evaluate(self, block: RowBlock) -> Floats:
        """X of shape (n, p): per step, then summed over the steps of each row. NaN where a raw value is not known."""
        if self._places is not None:
            lines = block.raw.take(self._places, axis=1)
            for j, column in enumerate(self.columns):
                if column.formula == INTERCEPT:
                    lines[:, j] = 1.0
            return sum_steps(lines, block.offsets)
        raw = Raw(block.raw, self.target.vocabulary)
        lines = np.empty((len(raw), len(self.columns)))
        for j, column in enumerate(self.columns):
            if column.formula == INTERCEPT:
                lines[:, j] = 1.0
            elif isinstance(column.formula, str):
                lines[:, j] = raw[column.formula]
            else:
                lines[:, j] = column.formula(raw)
        return sum_steps(lines, block.offsets)


def sum_steps(lines: Floats, offsets: NDArray[np.int64]) -> Floats:
    """Sum lines (m, p) per row; rows of one step each come back as they are."""
    if len(offsets) - 1 == len(lines):
        return lines
    if len(lines) == 0:
        return np.empty((0, lines.shape[1]))
    return np.asarray(np.add.reduceat(lines, offsets[:-1], axis=0), dtype=np.float64)
