"""Shape factors: how much longer than x beta the steps of each batch shape take, while predicting by it wins.

    X_c <- X_c + rho (mean x - X_c)                        mean work of shape c, (p,)
    U_c <- U_c + rho mean(clip(e, -k_c, k_c))              mean log(y / x beta), e: a row's against the mean so far
    s_c <- s_c + rho (1.2533 mean |e| - s_c)               spread
    rho  = rows of the block / (min(rows before, 256) + rows of the block)
    k_c  = 4 s_c, and 0.9 for the first 16 rows            bounds what a stall can do
    F_c  = exp(U_c n_c / (n_c + 8))                        the prediction of a step is x beta F_c

A shape (online/blocks.py) starts with the median of its first rows, within 0.9 too: one beyond a factor of exp(0.9) =
2.5 may be a stall, and if all are, the sum of 0.9 / n leads there within 16 rows. What is kept is Y_c = U_c +
log X_c beta, so that a shape's time stays true while beta is learned.

A shape's mean counts its stalls, which beta leaves out, and where stalls are many it is a time that hardly any step
takes. So factors are applied for as long as they do not predict worse than none: over rows not yet learned,

    a = |x beta / y - 1|    b = |x beta F / y - 1|    A = sum clip(a - b, -0.05, 0.05)    B = sum min(a, 0.5)

with a half-life of 1000 rows, F is left out where A < -0.05 B and applied again where A >= 0. Always applied, F leaves
12.5 % for 12.0 in the hold-out of the recording c7.

Guarantee: log ratios within 700 give finite sums. Adding A and B of several is commutative and associative.
Reference: Dawid, The prequential approach (JRSS A 147, 1984).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .blocks import CELLS, PREFILL_CELL, Groups, cell_name, median_of
from .constants import (
    ERROR_MAX,
    ERROR_ROWS,
    FEW_ROWS,
    MEAN_ABS_TO_SD,
    MEMORY_ROWS,
    NOISE_ROWS,
    QUIETEST,
    TINY_US,
    WORTH,
)
from .features import INTERCEPT
from .rows import Floats, Ints, Mask
from .snapshot import ShapeFactorSnapshot
from .state import Stateful

# Guess: rows with which a shape's mean is believed by half; with 16 the median error of x beta F on twelve recordings
# is 0.1 points larger.
_SHRINK_ROWS = 8.0
# Chosen: on the recordings and on seeds below 200 (tests/bench/learning_drift.py). With 0 no prefill that takes twice
# as long is found, of ten; without any reach five changes are reported of four calm machines that no line fits.
_FREE_WORK = 0.35
# Guess: spreads that a row may move a mean by; with 3 errors are the same within 0.1 points. Guess: the log ratio while
# the spread is not known; with less than 0.9 references come too late for a change of mix not to look like one of
# speed, and with 2.3 nothing is gained.
_CLIP, _FIRST_CLIP = 4.0, 0.9
_USUAL_WORK = ("prefill_tokens", "requests", "decode_context_tokens")


def _log_us(x: Floats, beta: Floats) -> Floats:
    """Log of the time of work x (..., p) by coefficients (p,), which is above 0."""
    logs: Floats = np.log(np.maximum(x @ beta, TINY_US))
    return logs


def shrinkage(rows: Floats) -> Floats:
    """The share of U_c that is in log F_c, of shapes with so many rows, (g,)."""
    share: Floats = rows / (rows + _SHRINK_ROWS)
    return share


class ShapeFactors(Stateful):
    """Of one target: rows (512,), Y (512,), spread (512,) and X (512, p) of every shape; A and B: ``won``, ``error``.

    ``applied``: whether x beta is multiplied by F.
    """

    SAVED = ("rows", "log_y", "spread", "x", "applied", "won", "error")

    def __init__(self, p: int) -> None:
        self.rows, self.log_y, self.spread = np.zeros(CELLS), np.zeros(CELLS), np.zeros(CELLS)
        self.x = np.zeros((CELLS, p))
        self.applied, self.won, self.error = True, 0.0, 0.0

    # ---------------------------------------------------------------- reading

    def knows(self, cell: Ints) -> Mask:
        """Whether there is a mean to compare rows of these shapes with, (n,)."""
        known: Mask = self.rows[cell] >= FEW_ROWS
        return known

    def mean_log_ratio(self, ids: Ints, beta: Floats) -> Floats:
        """U_c of these shapes, (g,)."""
        return self.log_y[ids] - _log_us(self.x[ids], beta)

    def log_factors(self, ids: Ints, beta: Floats) -> Floats:
        """Log F of these shapes, (g,); 0 where there are no rows."""
        return self.mean_log_ratio(ids, beta) * shrinkage(self.rows[ids])

    def snapshot(self, beta: Floats, names: Sequence[str]) -> dict[str, ShapeFactorSnapshot]:
        """Factor of each shape that was seen, by name, and the usual work of such a step, to four digits.

        No work is told where a column is missing, or factors are left out: usual times have the stalls of their shapes,
        which ``mean_factor`` counts then.
        """
        ids = self.rows.nonzero()[0]
        factors = np.exp(self.log_factors(ids, beta)) if self.applied else np.ones(len(ids))
        work: Sequence[Floats | None] = [None] * len(ids)
        if self.applied and set(names) >= {INTERCEPT, *_USUAL_WORK}:
            steps = np.maximum(self.x[ids, names.index(INTERCEPT)], 1.0)
            sums = self.x[ids][:, [names.index(name) for name in _USUAL_WORK]]
            exact = np.column_stack((sums, np.exp(self.log_y[ids]))) / steps[:, None]
            digits = 10.0 ** (3.0 - np.floor(np.log10(np.maximum(exact, 1e-3))))
            work = [*(np.rint(exact * digits) / digits)]
        return {
            cell_name(c): ShapeFactorSnapshot(
                factor=factor, rows=float(self.rows[c]), usual=None if each is None else tuple(each.tolist())
            )
            for c, factor, each in zip(ids.tolist(), factors.tolist(), work, strict=True)
        }

    def comparability(self, cell: Ints, x: Floats, beta: Floats) -> Floats:
        """How far rows x (n, k) can be compared with the mean of their shapes, 0 to 1, (n,): v = 1 / (1 + (r / 5 %)^2).

        r is how far beta (p,) reaches from the usual work of their shapes to theirs, in their time:

            r = sum_j d_j c_j |x_j - X_cj| / sum_j c_j x_j      d_j = max(0, |log(x_j / X_cj)| - 0.35)

        over the first k columns, what is below 0 counting as 0. c_j is beta_j. With prefill it is max_j d_j: what
        prompts pay for attention to contexts, no column says; without this the machines "quadratic" of
        tests/bench/learning_drift.py report changes. A twentieth of a column's mean, added on both sides of the
        logarithm, costs next to nothing.
        """
        usual, rows = np.maximum(self.x[:, : x.shape[1]], 0.0), max(float(self.rows.sum()), 1.0)
        x, cost = np.maximum(x, 0.0), np.maximum(beta[: x.shape[1]], 0.0)
        least, usual = WORTH * (self.rows @ usual) / rows + TINY_US, usual.take(cell, axis=0)
        far = np.maximum(np.abs(np.log((x + least) / (usual + least))) - _FREE_WORK, 0.0)
        by_form = ((far * np.abs(x - usual)) @ cost) / np.maximum(x @ cost, TINY_US)
        reach = np.where(cell >= PREFILL_CELL, far.max(axis=1), by_form)
        comparable: Floats = 1.0 / (1.0 + np.square(reach / WORTH))
        return comparable

    # ---------------------------------------------------------------- learning

    def score(self, log_ratio: Floats, log_factor: Floats) -> None:
        """Rows not yet learned: log(y / x beta) and log F of each, (n,)."""
        without, by_factors = (np.abs(np.expm1(added - log_ratio)) for added in (0.0, log_factor))
        kept, won = 0.5 ** (len(log_ratio) / ERROR_ROWS), np.minimum(np.maximum(without - by_factors, -WORTH), WORTH)
        self.won = kept * self.won + float(won.sum())
        self.error = kept * self.error + float(np.minimum(without, ERROR_MAX).sum())
        self._decide()

    def _decide(self) -> None:
        self.applied = self.won >= (-WORTH * self.error if self.applied else 0.0)

    def learn(self, cell: Ints, x: Floats, log_ratio: Floats, beta: Floats) -> None:
        """Rows in order of time: shape (n,), x (n, p), log(y / x beta) (n,)."""
        groups = Groups.of(cell)
        ids, starts, count = groups.ids, groups.starts, groups.sizes
        x, log_ratio = x.take(groups.order, axis=0), log_ratio.take(groups.order)
        before, spread = self.rows[ids], self.spread[ids]
        for k in np.flatnonzero(before == 0.0):
            rows = slice(starts[k], starts[k] + count[k])
            self.x[ids[k]] = x[rows].mean(axis=0)
            first = min(max(median_of(log_ratio[rows]), -_FIRST_CLIP), _FIRST_CLIP)
            self.log_y[ids[k]] = first + _log_us(self.x[ids[k]], beta)
        usual = self.mean_log_ratio(ids, beta)
        limit = np.where(before < FEW_ROWS, _FIRST_CLIP, _CLIP * np.maximum(spread, QUIETEST)).repeat(count)
        e = np.minimum(np.maximum(log_ratio - usual.repeat(count), -limit), limit)
        rate = count / (np.minimum(before, MEMORY_ROWS) + count)
        share = rate / count
        self.x[ids] = mean = self.x[ids] * (1.0 - rate)[:, None] + np.add.reduceat(x, starts, axis=0) * share[:, None]
        self.log_y[ids] = usual + share * np.add.reduceat(e, starts) + _log_us(mean, beta)
        self.spread[ids] = spread * (1.0 - rate) + MEAN_ABS_TO_SD * share * np.add.reduceat(np.abs(e), starts)
        self.rows[ids] = before + count

    def follow_speed(self, log_time_ratio: float, *, prefill: bool) -> None:
        """At a change of speed: all shapes, or those with prefill, take longer by this log ratio, until relearned.

        Those with prefill are forgotten: what made most steps slower may make them slower by far less, and a reference
        that is too high would look like a second change.
        """
        cells = slice(PREFILL_CELL if prefill else 0, None)
        self.log_y[cells] += log_time_ratio * (self.rows[cells] > 0.0)
        self.rows[cells] = np.minimum(self.rows[cells], 2.0 * NOISE_ROWS)
        self.rows[PREFILL_CELL:] = 0.0

    def follow_coefficients(self, then: ShapeFactors, before: Floats, after: Floats) -> None:
        """Once it is known which term moved: shapes take what they took ``then``, but by the coefficients ``after`` it.

        ``before`` and ``after``: (p,) each.
        """
        ids = then.rows.nonzero()[0]
        self.x[ids] = then.x[ids]
        self.log_y[ids] = then.mean_log_ratio(ids, before) + _log_us(then.x[ids], after)
        self.rows[ids] = np.minimum(then.rows[ids], 2.0 * NOISE_ROWS)

    def add(self, other: ShapeFactors) -> None:
        """Rows of both, 256 at most of each shape; applied unless both together have lost by it."""
        mine, theirs = np.minimum(self.rows, MEMORY_ROWS), np.minimum(other.rows, MEMORY_ROWS)
        self.rows += other.rows
        share = theirs / np.maximum(mine + theirs, 1.0)
        self.log_y += share * (other.log_y - self.log_y)
        self.spread += share * (other.spread - self.spread)
        self.x += share[:, None] * (other.x - self.x)
        self.won, self.error = self.won + other.won, self.error + other.error
        self.applied = True
        self._decide()
