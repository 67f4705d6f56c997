"""Blocks: which rows are learned together, decided by the rows themselves.

A block ends when it has ``block_rows`` rows, or before a row whose end lies ``block_ns`` or more after the end of the
block's first row. Neither depends on how many rows a call brings or on when it is made, so a live run, a replay at any
speed and a replay in one piece cut the same blocks and learn the same coefficients
(tests/property/test_bank.py::test_call_sizes_do_not_matter).

A :class:`Design` is a row block after evaluation: the columns of all feature sets side by side and what the learners
need to know of a row beside them.

    x (n, P)   phase (n, k)   elapsed_us (n,)   steps (n,)   weight (n,)   stratum (n,)   cell (n,)   end_ns (n,)
    engine (n,): numbers of the engines that sent them

Stratum (statistics, intervals): has_prefill x floor(log2 mean requests), 2 x 16. Cell (drift): the batch shape at a
finer grain, so that a change of speed is told from a change of mix by comparing like with like.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .rows import PHASES, Floats, Ints, Mask, RowBlock, Target
from .state import StateError, Stateful, Tree

# Guard: batches of 2^15 requests and more are one stratum.
_OCTAVES = 16
STRATA = 2 * _OCTAVES
# Derived: vLLM pads CUDA graphs to multiples of 8, up to 512; up to 16 requests one more is told apart.
_EXACT, _PADDED = 16, 512
_CELL_PADDED = _EXACT - 2 + _PADDED // 8
"""The first cell of eight per octave."""
# Derived: the first cell of steps with prefill; the 50 cells before it reach from 512 requests to 39,000.
PREFILL_CELL = 128
# Guard: prefills of 2^15.5 tokens and more are one cell, and so are batches of 2^11 requests and more.
_CELL_HALF_OCTAVES, _CELL_OCTAVES = 32, 12
CELLS = PREFILL_CELL + _CELL_OCTAVES * _CELL_HALF_OCTAVES
_LAST_OCTAVE = 2.0 ** (_OCTAVES - 1)


def median_of(values: Floats | list[float]) -> float:
    """Equal to numpy's, whose own takes ten times as long for few values and imports masked arrays; NaN of none."""
    ordered, half = np.sort(values), len(values) // 2
    if not len(ordered):
        return math.nan
    return float(ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half]))


@dataclass(slots=True)
class Groups:
    """Rows of a block put in order of an integer key: ``order`` (n,), ``starts`` and ``ids`` (g,), ``sizes`` (g,)."""

    order: Ints
    starts: Ints
    ids: Ints
    sizes: Ints

    @staticmethod
    def of(key: Ints) -> Groups:
        """Stable, so that rows of a group keep their order in time."""
        n = len(key)
        order = key.argsort(kind="stable")
        ordered = key.take(order)
        edge = np.empty(n, np.bool_)
        edge[:1] = True
        np.not_equal(ordered[1:], ordered[:-1], out=edge[1:])
        starts = edge.nonzero()[0]
        sizes = np.empty_like(starts)
        sizes[:-1] = starts[1:] - starts[:-1]
        sizes[-1:] = n - starts[-1:]
        return Groups(order, starts, ordered.take(starts), sizes)


@dataclass(slots=True)
class Design(Stateful):
    """Evaluated rows; see the module's docstring for shapes. A set that does not know a row has NaN in x."""

    SAVED = ("x", "phase", "elapsed_us", "steps", "weight", "stratum", "cell", "end_ns", "engine")
    UNKNOWN = frozenset({"x"})

    x: Floats
    phase: Floats
    elapsed_us: Floats
    steps: Floats
    weight: Floats
    stratum: Ints
    cell: Ints
    end_ns: Ints
    groups: Groups | None = None
    engine: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """Of nobody said: all of number 0."""

    def __post_init__(self) -> None:
        """Rows have an engine."""
        if len(self.engine) != len(self.elapsed_us):
            self.engine = np.zeros(len(self.elapsed_us), np.int64)

    def __len__(self) -> int:
        """Number of rows n."""
        return len(self.elapsed_us)

    def grouped(self) -> Groups:
        """Rows grouped by stratum; made once per block."""
        if self.groups is None:
            self.groups = Groups.of(self.stratum)
        return self.groups

    def take(self, rows: Mask | slice) -> Design:
        """The chosen rows only; of a slice, as views."""
        chosen: dict[str, Any] = {name: getattr(self, name)[rows] for name in Design.SAVED}
        return Design(**chosen)

    def slice(self, start: int, stop: int) -> Design:
        """Rows start..stop-1, as views."""
        return self.take(slice(start, stop))

    def widened(self, columns: int) -> Design:
        """The same rows with so many columns; the new ones are not known: NaN."""
        unknown = np.full((len(self), columns - self.x.shape[1]), np.nan)
        return replace(self, x=np.concatenate([self.x, unknown], axis=1))

    def restored(self) -> None:
        """Columns are of one length."""
        if not len(self) or any(len(getattr(self, name)) != len(self) for name in self.SAVED):
            raise StateError("columns of different lengths, or no rows")
        if ((self.stratum < 0) | (self.stratum >= STRATA) | (self.cell < 0) | (self.cell >= CELLS)).any():
            raise StateError("stratum or cell out of range")

    @staticmethod
    def of_state(state: Tree) -> Design:
        """Rows from the state file, of any number of columns; StateError if they do not fit."""
        rows = Design.empty(state["x"].shape[1])
        rows.from_state(state)
        return rows

    @staticmethod
    def empty(columns: int) -> Design:
        """A design without rows, of the same columns."""
        x, phase, none, nothing = np.empty((0, columns)), np.empty((0, len(PHASES))), np.empty(0), np.empty(0, np.int64)
        return Design(x, phase, none, none, none, nothing, nothing, nothing)

    @staticmethod
    def concatenate(parts: list[Design]) -> Design:
        """All rows of designs of one width, in order; needs at least one."""
        if len(parts) == 1:
            return parts[0]
        joined: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in Design.SAVED
        }
        return Design(**joined)


class Cutter:
    """Holds the partial block and cuts what is pushed into it: ``block_rows`` rows, or those of ``block_ns``."""

    __slots__ = ("_first_ns", "_parts", "_rows", "block_ns", "block_rows")

    def __init__(self, block_rows: int, block_ns: int) -> None:
        self.block_rows, self.block_ns = block_rows, block_ns
        self._parts: list[Design] = []
        self._rows = 0
        self._first_ns = 0

    def __len__(self) -> int:
        """Rows waiting in the partial block."""
        return self._rows

    def push(self, design: Design) -> Iterator[Design]:
        """Add rows; yields every block that is complete.

        Sizes that are set while a block is learned hold for the next one.
        """
        start, n = 0, len(design)
        while start < n:
            if self._rows == 0:
                self._first_ns = int(design.end_ns[start])
            until = min(n, start + self.block_rows - self._rows)
            late = (design.end_ns[start:until] >= self._first_ns + self.block_ns).nonzero()[0]
            stop = start + int(late[0]) if len(late) else until
            self._rows += stop - start
            if stop > start:
                self._parts.append(design.slice(start, stop))
            start = stop
            if len(late) or self._rows >= self.block_rows:
                yield self.flush()

    def flush(self) -> Design:
        """The partial block as it stands, which becomes empty; needs at least one row in it."""
        block = Design.concatenate(self._parts)
        self._parts, self._rows = [], 0
        return block

    def pending(self) -> Design | None:
        """The partial block, left as it is; None when there is none."""
        if self._parts:
            self._parts = [Design.concatenate(self._parts)]
        return self._parts[0] if self._parts else None

    def restore(self, waiting: Design) -> None:
        """Take a saved partial block."""
        self._parts, self._rows, self._first_ns = [waiting], len(waiting), int(waiting.end_ns[0])

    def widen(self, columns: int) -> None:
        """Give the waiting rows more columns, which they do not know: NaN."""
        self._parts = [part.widened(columns) for part in self._parts]


def strata_of(target: Target, rows: RowBlock) -> tuple[Ints, Ints]:
    """Stratum and cell of each row, shapes (n,); what is not known counts as the smallest."""
    n = len(rows)
    if target.vector == "alpha":
        stratum = np.zeros(n, np.int64)
        if target is Target.QUEUE_WAIT:
            # A wait behind others is another law than a wait for the running step (Little's law in saturation).
            stratum = _octave(1.0 + rows.raw[rows.offsets[:-1], target.vocabulary.index("waiting")])
        return stratum, stratum
    values = np.array([rows.raw[:, target.vocabulary.index(name)] for name in ("requests", "prefill_tokens")])
    means = np.where(np.isfinite(values), values, 0.0)
    if not rows.single:
        means = np.add.reduceat(means, rows.offsets[:-1], axis=1) / rows.steps
    requests, prefill = means
    octave, cell = _octave(requests), _decode_cell(requests)
    filled = (prefill > 0.0).nonzero()[0]
    if not len(filled):
        return octave, cell
    own = octave.take(filled)
    cell[filled] = _prefill_cell(own, prefill.take(filled))
    octave[filled] = _OCTAVES + own
    return octave, cell


def _octave(value: Floats) -> Ints:
    """Floor of log2, 0 to 15; of NaN 0."""
    exponent: Ints = np.frexp(np.fmin(np.fmax(value, 1.0), _LAST_OCTAVE))[1].astype(np.int64)
    exponent -= 1
    return exponent


def _decode_cell(requests: Floats) -> Ints:
    # Exact up to 16 requests; then by eights, because CUDA graphs are padded to multiples of 8 and kernels work in
    # tiles of 64: one request more costs 12 % at a tile's edge; beyond 512 nobody pads, eight cells per octave.
    cell = np.rint(requests)
    many = requests > _EXACT
    if many.any():
        several = requests[many]
        eights = _EXACT - 2.0 + np.ceil(several / 8.0)
        octaves = _CELL_PADDED + 8.0 * np.log2(np.maximum(several, _PADDED) / _PADDED)
        cell[many] = np.where(several <= _PADDED, eights, octaves)
    return np.minimum(np.maximum(cell, 0.0), PREFILL_CELL - 1.0).astype(np.int64)


def _prefill_cell(octave: Ints, prefill: Floats) -> Ints:
    tokens = np.minimum(2.0 * np.log2(np.maximum(prefill, 1.0)), _CELL_HALF_OCTAVES - 1.0).astype(np.int64)
    return PREFILL_CELL + np.minimum(octave, _CELL_OCTAVES - 1) * _CELL_HALF_OCTAVES + tokens


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
    if cell < _CELL_PADDED:
        return f"decode:{8 * (cell - 14) - 7}-{8 * (cell - 14)}"
    k = cell - _CELL_PADDED
    low = 505 if k == 0 else math.ceil(512 * 2 ** (k / 8))
    return f"decode:{_range(low, math.ceil(512 * 2 ** ((k + 1) / 8)) - 1, last=cell == PREFILL_CELL - 1)}"


def _range(low: int, high: int, *, last: bool) -> str:
    return f"{low}+" if last else f"{low}" if low == high else f"{low}-{high}"
