"""Blocks: which rows are learned together, decided by the rows themselves.

A block ends when it has ``block_rows`` rows, or before a row whose end lies ``block_ns`` or more after the end of the
block's first row. Neither depends on how many rows a call brings or on when it is made, so a live run, a replay at any
speed and a replay in one piece cut the same blocks and learn the same coefficients
(tests/property/test_bank.py::test_call_sizes_do_not_matter).

Rows that are no measurement are left out and counted before. A :class:`Design` is a block as one feature set sees it.

Stratum (statistics, intervals): has_prefill x floor(log2 mean requests), 2 x 16. Cell (shape factors, change of
speed): the batch shape at a finer grain. Like is compared with like, so that a change of mix is no change of speed.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from .constants import NOISE_ROWS, VALUE_MAX
from .rows import REQUEST_FEATURES, STEP_FEATURES, Floats, Ints, Mask, Quality, RowBlock, RowOutcome, Target

if TYPE_CHECKING:
    from .features import FeatureSet

# Guard: batches of 2^15 requests and more are one stratum.
_OCTAVES = 16
STRATA = 2 * _OCTAVES
# Derived: vLLM pads CUDA graphs to multiples of 8; up to 16 requests one more is told apart.
_EXACT = 16
# Derived: the first cell of steps with prefill; the one before it is of 897 requests and more.
PREFILL_CELL = 128
# Guard: prefills of 2^15.5 tokens and more are one cell, and so are batches of 2^11 requests and more.
_CELL_HALF_OCTAVES, _CELL_OCTAVES = 32, 12
CELLS = PREFILL_CELL + _CELL_OCTAVES * _CELL_HALF_OCTAVES
_LAST_OCTAVE = 2.0 ** (_OCTAVES - 1)
# Derived: a nanosecond, the grain of every clock; a shorter time is no measurement.
ELAPSED_US_MIN = 1e-3
_SHAPE = [STEP_FEATURES.index(name) for name in ("requests", "prefill_tokens")]
_WAITING = REQUEST_FEATURES.index("waiting")


def median_of(values: Floats | list[float]) -> float:
    """Median, NaN of no values; for few values ten times as fast as numpy's, which also imports masked arrays."""
    ordered, half = np.sort(values), len(values) // 2
    if not len(ordered):
        return math.nan
    return float(ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half]))


@dataclass(slots=True)
class Groups:
    """Rows of a block put in order of an integer key: ``order`` (n,), ``starts``, ``ids`` and ``sizes`` (g,)."""

    order: Ints
    starts: Ints
    ids: Ints
    sizes: Ints

    @staticmethod
    def of(key: Ints) -> Groups:
        """Group rows by ``key``; rows of a group keep their order in time."""
        order = key.argsort(kind="stable")
        ordered = key.take(order)
        starts = np.concatenate(([True][: len(key)], ordered[1:] != ordered[:-1])).nonzero()[0]
        return Groups(order, starts, ordered.take(starts), np.diff(starts, append=len(key)))


@dataclass(frozen=True, slots=True)
class Design(RowBlock):
    """The rows of a block that one feature set knows, with its columns x (n, p), stratum and cell (n,)."""

    x: Floats
    stratum: Ints
    cell: Ints
    groups: Groups
    """Its rows, grouped by stratum."""

    @property
    def windows(self) -> Mask:
        """Mask of rows between two pages, and of rows with so many steps that they share no noise, (n,)."""
        wide: Mask = (self.steps >= NOISE_ROWS) | (self.quality == Quality.METRICS)
        return wide

    @staticmethod
    def of(features: FeatureSet, rows: RowBlock) -> Design:
        """Evaluate the feature set on rows of its target; rows with an unknown column are left out."""
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            x = features.evaluate(rows)
        known: Mask = np.asarray((np.abs(x) <= VALUE_MAX).all(axis=1))
        if not known.all():
            rows, x = rows.take(known), x[known]
        stratum, cell = strata_of(features.target, rows)
        return Design(**rows.to_state(), x=x, stratum=stratum, cell=cell, groups=Groups.of(stratum))


def rows_of_first_block(end_ns: Ints, block_rows: int, block_ns: int) -> int:
    """How many of the rows that end at these times, (n,), are the first block; 0 while it may get more of them."""
    late = (end_ns[:block_rows] >= end_ns[:1] + block_ns).nonzero()[0]
    return int(late[0]) if len(late) else block_rows * (len(end_ns) >= block_rows)


def learnable_rows(rows: RowBlock, sets: Collection[FeatureSet]) -> tuple[RowBlock, Counter[RowOutcome]]:
    """Select the rows that can be learned, and count what became of each row; one that no set can evaluate is left out.

    Infinite raw values become NaN, which stands for unknown.
    """
    if (endless := np.isinf(rows.raw)).any():
        rows = replace(rows, raw=np.where(endless, np.nan, rows.raw))
    y, weight, n = rows.elapsed_us, rows.weight, len(rows)
    finite = np.isfinite(y) & np.isfinite(weight) & np.isfinite(rows.phase).all(axis=1)
    bounded = (y >= ELAPSED_US_MIN) & (y <= VALUE_MAX) & (weight <= VALUE_MAX) & (weight >= 1.0 / VALUE_MAX)
    bounded &= (np.abs(rows.phase) <= 1.0).all(axis=1)
    known, left, outcome = np.zeros(n, np.bool_), np.ones(n, np.bool_), Counter[RowOutcome]()
    for each in sets:
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            x = each.evaluate(rows)
        here = np.isfinite(x).all(axis=1)
        known |= here
        bounded &= (np.abs(x) <= VALUE_MAX).all(axis=1) | ~here
    for reason, passes in (
        (RowOutcome.NOT_FINITE, finite),
        (RowOutcome.NOT_POSITIVE, (y > 0.0) & (weight > 0.0)),
        (RowOutcome.OUT_OF_RANGE, bounded),
        (RowOutcome.UNKNOWN_FEATURE, known),
    ):
        outcome[reason] = int(np.count_nonzero(left & ~passes))
        left &= passes
    outcome[RowOutcome.LEARNED] = int(np.count_nonzero(left))
    return rows if left.all() else rows.take(left), +outcome


def strata_of(target: Target, rows: RowBlock) -> tuple[Ints, Ints]:
    """Stratum and cell of each row, shapes (n,); an unknown feature counts as the smallest value."""
    n = len(rows)
    if target.vector == "alpha":
        stratum = np.zeros(n, np.int64)
        if target is Target.QUEUE_WAIT:
            # A wait behind others is another law than a wait for the running step (Little's law in saturation).
            stratum = _octave(1.0 + rows.raw[rows.offsets[:-1], _WAITING])
        return stratum, stratum
    values = rows.raw[:, _SHAPE].T
    means = np.where(np.isfinite(values), values, 0.0)
    if not rows.single:
        means = np.add.reduceat(means, rows.offsets[:-1], axis=1) / rows.steps
    requests, prefill = means
    octave, filled = _octave(requests), prefill > 0.0
    tokens = np.minimum(2.0 * np.log2(np.maximum(prefill, 1.0)), _CELL_HALF_OCTAVES - 1.0).astype(np.int64)
    with_prefill = PREFILL_CELL + np.minimum(octave, _CELL_OCTAVES - 1) * _CELL_HALF_OCTAVES + tokens
    return octave + _OCTAVES * filled, np.where(filled, with_prefill, _decode_cell(requests))


def _octave(value: Floats) -> Ints:
    """Floor of log2, 0 to 15; of NaN 0."""
    return np.frexp(np.fmin(np.fmax(value, 1.0), _LAST_OCTAVE))[1].astype(np.int64) - 1


def _decode_cell(requests: Floats) -> Ints:
    # Exact up to 16 requests; then by eights, because CUDA graphs are padded to multiples of 8 and kernels work in
    # tiles of 64: one request more costs 12 % at a tile's edge.
    cell = np.where(requests <= _EXACT, np.rint(requests), _EXACT - 2.0 + np.ceil(requests / 8.0))
    return np.minimum(np.maximum(cell, 0.0), PREFILL_CELL - 1.0).astype(np.int64)


def stratum_name(stratum: int) -> str:
    """``decode:8-15`` for has_prefill = 0 and 8 to 15 requests, ``prefill:1`` for one request with prefill."""
    kind, octave = divmod(stratum, STRATA // 2)
    low, high = 2**octave, 2 ** (octave + 1) - 1
    return f"{'prefill' if kind else 'decode'}:{low if low == high else f'{low}-{high}'}"


@functools.cache
def cell_name(cell: int) -> str:
    """``decode:3``, ``decode:17-24``, ``prefill:8-15:64-90`` (requests, then prefill tokens)."""
    if cell >= PREFILL_CELL:
        octave, half = divmod(cell - PREFILL_CELL, _CELL_HALF_OCTAVES)
        fewest, most = math.ceil(2 ** (half / 2)), math.ceil(2 ** ((half + 1) / 2)) - 1
        tokens = _range(fewest, most, last=half == _CELL_HALF_OCTAVES - 1)
        # Between 1.41 and 2 tokens there is no whole number, only means of several steps.
        requests = _range(2**octave, 2 ** (octave + 1) - 1, last=octave == _CELL_OCTAVES - 1)
        return f"prefill:{requests}:{'1.5' if half == 1 else tokens}"
    if cell <= _EXACT:
        return f"decode:{cell}"
    most = 8 * (cell - _EXACT + 2)
    return f"decode:{_range(most - 7, most, last=cell == PREFILL_CELL - 1)}"


def _range(low: int, high: int, *, last: bool) -> str:
    return f"{low}+" if last else f"{low}" if low == high else f"{low}-{high}"
