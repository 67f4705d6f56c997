"""Cells: what a step of each batch shape usually takes; the references that drift detection compares with.

    X_c <- X_c + rho (mean x - X_c)                            mean work of cell c, (p,)
    U_c <- U_c + rho mean(clip(e, -4 s_c, 4 s_c))              usual log ratio, U_c = Y_c - log X_c beta
    s_c <- s_c + rho (1.2533 mean |e| - s_c)                   spread
    rho  = rows of the block / (min(rows before, 256) + rows of the block)
    F_c = exp(U_c n_c / (n_c + k_c))                           shape factor: the prediction of a step is x beta F_c
    k_c = 4 s_c^2 / t^2, in 4..16                              rows whose mean is as uncertain as shapes differ
    t^2 = sum w_c (U_c^2 - s_c^2 / n_c) / sum w_c              how much shapes differ, w_c = n_c / (n_c + 8)
    usual time of c = exp(Y_c)

e is relative to the cell's reference. What is kept is Y_c, in absolute terms, so that a reference stays true while
beta is still being learned. Clipping bounds what a stall can do; a cell opens with the median of its first rows.

All references follow the rows of any cell a little, so that a slow change of speed is none of shapes. Where contexts
grow or shrink, misfit moves them too, and cells that are not visited stay moved: by up to a fortieth on machines whose
speed never changed.

Shrinkage is that of Efron and Morris (JASA 70, 1975), each cell by its own error; s_c is pooled by 8 rows of all. Steps
that follow one another resemble each other: four count as one, chosen from 1, 4 and 16 on the bundled recordings.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from online.blocks import CELLS, Groups
from online.rows import Floats, Ints, Mask
from online.state import saved

from .detectors import DriftSettings
from .medians import median_of

_RIDGE = 1e-6  # on the unit diagonal, as in every solve
TINY = 1e-12
_MEAN_ABS_TO_SD = 1.2533
_LEARN_CLIP = 4.0
_UNSEEN = 1e-30
_SHRINK_ROWS = 8.0
"""Usual k, and the rows by which a cell's spread is drawn to that of all."""
_ALIKE_ROWS = 4.0
"""Steps in succession that tell as much as one."""
_SHRINK_ROWS_MIN, _SHRINK_ROWS_MAX = 4.0, 16.0
_RELEARNED_ROWS = 64.0
_COMMON_ROWS = 2048.0
_LEAST_WORK = 0.1
USUAL_WORK = ("prefill_tokens", "requests", "decode_context_tokens")
UsualWork = tuple[float, float, float, float]


@dataclass(slots=True)
class SpeedFit:
    """beta (p,), the robust scale of its relative residuals, and the evidence: A (p, p) and its effective rows."""

    beta: Floats
    scale: float
    a: Floats
    rows: float

    def stretch(self, x: Floats) -> Floats:
        """How far outside what the fit has seen rows x (n, p) are: 1 inside, more where it extrapolates, (n,).

        sqrt of the leverage of x / x beta in units of the mean leverage p / rows.
        """
        diagonal = self.a.diagonal()
        unseen = diagonal <= _UNSEEN
        scale = 1.0 / np.sqrt(np.where(unseen, _UNSEEN, diagonal))
        system = self.a * scale * scale[:, None]
        system.flat[:: len(scale) + 1] = 1.0 + _RIDGE
        relative = x * scale / np.maximum(x @ self.beta, TINY)[:, None]
        leverage = np.einsum("ij,ji->i", relative, np.linalg.solve(system, relative.T))
        mean = max(1.0, float((~unseen).sum())) / max(self.rows, 1.0)
        stretched: Floats = np.sqrt(np.maximum(leverage / mean, 1.0))
        return stretched


@dataclass(slots=True)
class CellRows:
    """What a block says to the cells: x (n, p), e (n,) against their references, and the beta that predicted."""

    x: Floats
    e: Floats
    beta: Floats


class Cells:
    """References of all cells: rows (512,), mean log y (512,), spread (512,), mean x (512, p)."""

    STATE = saved("cells", rows=Floats, log_y=Floats, spread=Floats, x=Floats)

    __slots__ = ("_factors", "log_y", "rows", "spread", "x")

    def __init__(self, p: int) -> None:
        # Asked three times with each block, by the beta that predicts it: to find what is off, to score and to watch.
        self._factors: tuple[Floats, Floats] | None = None
        self.rows = np.zeros(CELLS)
        self.log_y = np.zeros(CELLS)
        self.spread = np.zeros(CELLS)
        self.x = np.zeros((CELLS, p))

    def open(self, groups: Groups, fresh: Mask, x: Floats, log_ratio: Floats, beta: Floats) -> None:
        """First references of cells never seen: the median of their first rows, in the order of the groups."""
        self._factors = None
        for k in np.flatnonzero(fresh):
            rows = slice(groups.starts[k], groups.starts[k] + groups.sizes[k])
            c = groups.ids[k]
            self.x[c] = x[rows].mean(axis=0)
            self.log_y[c] = median_of(log_ratio[rows]) + math.log(max(float(self.x[c] @ beta), TINY))

    def usual(self, ids: Ints, beta: Floats) -> Floats:
        """Y_c - log X_c beta of cells, (g,)."""
        predicted: Floats = self.x[ids] @ beta
        return self.log_y[ids] - np.log(np.maximum(predicted, TINY))

    def log_factors(self, beta: Floats) -> Floats:
        """Log F_c = U_c n_c / (n_c + k_c) of all cells, (512,); 0 where there are no rows."""
        if self._factors is not None and self._factors[0] is beta:
            return self._factors[1]
        ids = self.rows.nonzero()[0]
        factors = np.zeros(CELLS)
        if len(ids):
            usual = self.usual(ids, beta)
            factors[ids] = usual * self.believed(ids, usual)
        self._factors = beta, factors
        return factors

    def believed(self, ids: Ints, usual: Floats) -> Floats:
        """How much of their usual log ratios, (g,), is in the factors of cells with rows: n_c / (n_c + k_c), (g,)."""
        rows = self.rows[ids]
        share: Floats = rows / (rows + self._shrink_rows(ids, usual))
        return share

    def _shrink_rows(self, ids: Ints, usual: Floats) -> Floats:
        """k_c of cells with rows, (g,)."""
        rows, variance = self.rows[ids], np.square(self.spread[ids])
        weight = rows / (rows + _SHRINK_ROWS)
        pooled = float(rows @ variance) / float(rows.sum())
        variance = weight * variance + (1.0 - weight) * pooled
        apart = float(weight @ (np.square(usual) - variance / rows)) / float(weight.sum())
        shrink_rows: Floats = np.minimum(
            np.maximum(_ALIKE_ROWS * variance / max(apart, TINY), _SHRINK_ROWS_MIN), _SHRINK_ROWS_MAX
        )
        return shrink_rows

    def usual_work(self, ids: Ints, names: Sequence[str]) -> list[UsualWork] | list[None]:
        """``USUAL_WORK`` of a step of each cell and its us, to four digits; None where a column is missing."""
        if not set(names) >= {"intercept", *USUAL_WORK}:
            return [None] * len(ids)
        sums = self.x[ids][:, [names.index(name) for name in USUAL_WORK]]
        steps = np.maximum(self.x[ids, names.index("intercept")], 1.0)
        work = np.column_stack((sums, np.exp(self.log_y[ids]))) / steps[:, None]
        digits = 10.0 ** (3.0 - np.floor(np.log10(np.maximum(work, 1e-3))))
        return [(p, n, c, us) for p, n, c, us in (np.rint(work * digits) / digits).tolist()]

    def unusual_work(self, ids: Ints, group: Ints, x: Floats, beta: Floats, free: float) -> tuple[Floats, Floats]:
        """How far rows x (n, p) are from the usual work of their cells: d and f of monitor.py, (n,) each.

        Rows are of cell ``ids[group]``, ids (g,), group (n,). A column counts from a tenth of its mean over all cells
        on: less of it costs next to nothing. Log ratios count from ``free`` on.
        """
        mean = (self.rows @ self.x) / max(float(self.rows.sum()), 1.0)
        least = _LEAST_WORK * np.maximum(mean, 0.0) + TINY
        usual = (np.maximum(self.x[ids], 0.0) + least).take(group, axis=0)
        work = np.maximum(x, 0.0) + least
        ratio = np.maximum(np.abs(np.log(work / usual)) - free, 0.0)
        seen = self.rows[ids] > 0.0
        if not seen.all():
            ratio *= seen.take(group)[:, None]
        unusual = functools.reduce(np.maximum, ratio.T)  # numpy takes twenty times as long by rows of a few
        if not unusual.any():
            return unusual, unusual
        by_form = ((ratio * np.abs(work - usual)) @ np.abs(beta)) / np.maximum(x @ beta, TINY)
        return unusual, by_form

    def learn(self, groups: Groups, usual: Floats, rows: CellRows, settings: DriftSettings) -> None:
        """Move the references of the visited cells toward these rows, which are in the order of the groups."""
        self._factors = None
        ids, starts, count = groups.ids, groups.starts, groups.sizes
        before, spread = self.rows[ids], self.spread[ids]
        limit = _LEARN_CLIP * np.maximum(spread, settings.spread_min)
        limit[before < settings.cell_rows_min] = np.inf
        each = np.repeat(limit, count)
        bounded = np.minimum(np.maximum(rows.e, -each), each)
        rate = count / (np.minimum(before, settings.cell_rows_max) + count)
        share = rate / count
        x = self.x[ids] * (1.0 - rate)[:, None] + np.add.reduceat(rows.x, starts, axis=0) * share[:, None]
        self.x[ids] = x
        usual = usual + share * np.add.reduceat(bounded, starts)
        self.log_y[ids] = usual + np.log(np.maximum(x @ rows.beta, TINY))
        absolute = np.add.reduceat(np.abs(bounded), starts)
        self.spread[ids] = spread + (_MEAN_ABS_TO_SD * share) * absolute - rate * spread
        self.rows[ids] = before + count

    def add(self, other: Cells, rows_max: float) -> None:
        """Rows of both, as far as they are remembered: ``rows_max`` at most of each cell."""
        self._factors = None
        mine, theirs = np.minimum(self.rows, rows_max), np.minimum(other.rows, rows_max)
        share = theirs / np.maximum(mine + theirs, 1.0)
        for name in ("log_y", "spread", "x"):
            own, others = getattr(self, name), getattr(other, name)
            own += (share if own.ndim == 1 else share[:, None]) * (others - own)
        self.rows += other.rows

    def adopt(self, donor: Cells) -> None:
        """Begin with the shapes of a donor, of as many columns or more, as if each were learned from 8 rows at most."""
        self._factors = None
        self.rows = np.minimum(donor.rows, _SHRINK_ROWS)
        self.log_y, self.spread = donor.log_y.copy(), donor.spread.copy()
        self.x = donor.x[:, : self.x.shape[1]].copy()

    def settle(self, cell: Ints, log_ratio: Floats, beta: Floats) -> None:
        """A donor's shapes have its speed: bring all to that of the first rows (n,), by those it knows."""
        known = self.rows[cell] > 0.0
        if known.any():
            self._factors = None
            self.log_y[self.rows > 0.0] += median_of(log_ratio[known] - self.usual(cell[known], beta))

    def follow(self, shift: float) -> None:
        """Rows that lie this much off their references, in sum: a slow change of speed is one of all shapes."""
        self._factors = None
        self.log_y += shift / _COMMON_ROWS * (self.rows > 0.0)

    def shift(self, cells: Mask, gain: float) -> None:
        """These cells (512,) take longer by this log gain, on average: what each of them takes is soon relearned."""
        self._factors = None
        self.log_y += gain * (cells & (self.rows > 0.0))
        self.rows[cells] = np.minimum(self.rows[cells], _RELEARNED_ROWS)

    def widen(self, more: int) -> None:
        """Columns never seen: their usual work is 0."""
        self._factors = None
        self.x = np.concatenate([self.x, np.zeros((CELLS, more))], axis=1)
