"""``river:residual``: what the published prediction leaves over, learned from what no column knows.

    r_i = log(y_i / (x_i beta F_c))       c_i = clip(w . u_i + w0, -0.15, 0.15)       published: x_i beta F_c exp(c_i)

u (n, 11): context of the row (online/river/context.py), where its second lies in the day, sin and cos. The regressor
is linear, by River's SGD(0.03) and Huber(0.05), fed with the rows that the thinning lets through
(online/river/thinning.py). A row that is off by more than 15 % teaches nothing, nor does any while a change of speed is
suspected: stalls are nobody's residual, and a speed belongs to beta.

It corrects while it wins. Over the rows it sees, each predicted before it is learned and forgotten with a half-life of
128 rows,

    A = sum clip(a_i - b_i, -0.05, 0.05)     B = sum min(a_i, 0.2)     a_i = |exp(-r_i) - 1|, b_i = |exp(c_i - r_i) - 1|

it is switched on where A > 0.02 B, after 128 rows, and off where A < 0; between the two it stays as it is.

Guarantee: c is finite and within its bounds whatever was learned. Rows that the thinning leaves out have no context and
no c of their own: the one of the last row that was seen stands. River is imported with the first row that it learns.
Merging: gradient steps do not add, so the weights start over, and it is off until it wins again; counts add.
Reference: Montiel et al., River (JMLR 2021); Herbster and Warmuth, Tracking the best expert (Machine Learning 1998).
"""

from __future__ import annotations

import math

import numpy as np

from online.rows import CorrectionOutcome, Floats, Ints, Mask, RowBlock
from online.snapshot import CorrectionSnapshot
from online.state import Finite, StateError, saved

from .context import CONTEXT
from .regressor import NAMES, Regressor
from .seen_rows import SeenRows
from .thinning import Thinning

RESIDUAL = "river:residual"
LIMIT = 0.15
START_ROWS = 128
ADVANTAGE = 0.02
_HALF_LIFE_ROWS = 128.0
_ADVANTAGE_MAX, _ERROR_MAX = 0.05, 0.2
_DAY_NS = 86_400_000_000_000
_STANDS_NS = 1_000_000_000
"""Event time after which a correction is made anew: it follows what passes within seconds."""


class Corrector:
    """Of the published prediction of one target.

    Attributes:
        active: whether its correction is part of what is published.
        waiting: rows that it will see, with their context.
        standing: c of the last row that it saw, which stands until the next; 0 while it is off.
        usual: log of the correction of the last rows that it saw, 0 while it is off.
        rows: what became of the rows, by the order of :class:`CorrectionOutcome`.
    """

    STATE = saved(
        "corrector",
        regressor=Regressor,
        thinning=Thinning,
        waiting=SeenRows,
        active=bool,
        standing=Finite,
        usual=Finite,
        advantage=Finite,
        error=Finite,
        rows=Ints,
    )

    def __init__(self, rows_per_s: float) -> None:
        self._rows_per_s = rows_per_s
        self.regressor = Regressor()
        self.thinning = Thinning(rows_per_s)
        self.waiting = SeenRows.none()
        self.active = False
        self.standing = self.usual = self.advantage = self.error = 0.0
        self.rows: Ints = np.zeros(len(CorrectionOutcome), np.int64)

    def restored(self) -> None:
        """Counts only grow."""
        if (self.rows < 0).any():
            raise StateError("negative")

    def look_at(self, rows: RowBlock, waiting: int) -> None:
        """Rows that will be learned after those that wait: remember the context of the ones that it will see."""
        seen = self.thinning.pick(rows.end_ns)
        if len(seen):
            self.waiting.add(waiting + seen, CONTEXT.evaluate(rows, seen))

    def skip(self, rows: int) -> None:
        """So many rows were predicted and are not looked at."""
        self._count_rows(CorrectionOutcome.THINNED, rows)

    def learn(self, context: Floats, log_ratio: Floats, end_ns: Ints, *, suspected: bool) -> Floats:
        """Correct, score and learn rows that are seen, each second by what was known before it.

        Args:
            context: their columns of :data:`CONTEXT`, (n, 9), n > 0.
            log_ratio: r, (n,).
            end_ns: event times, (n,).
            suspected: whether a change of speed is.

        Returns:
            c of each row as it was before its second, (n,), zeros while it is off.
        """
        seconds, near = _seconds(end_ns), np.abs(log_ratio) < LIMIT
        learned = int(np.count_nonzero(near))
        correction, known = np.empty(len(near)), []
        for rows in seconds:
            columns = self.columns(context[rows], int(end_ns[rows.stop - 1]))
            correction[rows] = self.correct(columns)
            known.append(self.regressor.iterations)
            if not suspected:
                self._learn_rows(columns, log_ratio[rows], near[rows] if learned < len(near) else None)
        if suspected:
            self._count_rows(CorrectionOutcome.SUSPECTED, len(near))
        else:
            self._count_rows(CorrectionOutcome.OUTLIER, len(near) - learned)
            self._count_rows(CorrectionOutcome.LEARNED, learned)
        return self._apply(seconds, log_ratio, correction, known, suspected=suspected)

    @staticmethod
    def columns(context: Floats, end_ns: int) -> Floats:
        """Columns u (n, 11) of rows with this context (n, 9) at one time."""
        columns = np.empty((len(context), len(NAMES)))
        angle = 2.0 * math.pi * (end_ns % _DAY_NS / _DAY_NS)
        columns[:, :-2], columns[:, -2:] = context, (math.sin(angle), math.cos(angle))
        return columns

    def correct(self, columns: Floats) -> Floats:
        """Give c of rows u (n, 11), (n,), whether it is on or not."""
        return np.minimum(np.maximum(columns @ self.regressor.weight + self.regressor.intercept, -LIMIT), LIMIT)

    def _learn_rows(self, columns: Floats, log_ratio: Floats, near: Mask | None) -> None:
        """Take a step by the rows that are ``near``, None: by all."""
        if near is not None:
            columns, log_ratio = columns[near], log_ratio[near]
        if len(log_ratio):
            self.regressor.learn(columns, log_ratio)
            if not self.regressor.finite:
                self.regressor = Regressor()

    def _apply(
        self, seconds: list[slice], log_ratio: Floats, correction: Floats, known: list[int], *, suspected: bool
    ) -> Floats:
        """C of each row that is applied, (n,); ``known``: rows that the regressor had learned before each second."""
        without = np.minimum(np.abs(np.expm1(-log_ratio)), 1.0)
        corrected = np.minimum(np.abs(np.expm1(correction - log_ratio)), 1.0)
        better = np.minimum(np.maximum(without - corrected, -_ADVANTAGE_MAX), _ADVANTAGE_MAX)
        each = np.array((correction, better, np.minimum(without, _ERROR_MAX)))
        sums = np.add.reduceat(each, [rows.start for rows in seconds], axis=1)
        applied = np.zeros(len(correction))
        for rows, iterations, (total, won, error) in zip(seconds, known, sums.T.tolist(), strict=True):
            kept = 2.0 ** ((rows.start - rows.stop) / _HALF_LIFE_ROWS)
            self.active = self.active and iterations > 0  # one that was not finite began anew
            if self.active:
                applied[rows] = correction[rows]
                self.usual += (1.0 - kept) * (total / (rows.stop - rows.start) - self.usual)
            else:
                self.usual = 0.0
            if not suspected:
                self.advantage, self.error = self.advantage * kept + won, self.error * kept + error
                self._decide(iterations)
        self.standing = float(applied[-1]) if self.active else 0.0
        return applied

    def _decide(self, iterations: int) -> None:
        if self.active:
            self.active = self.advantage >= 0.0
        elif iterations >= START_ROWS:
            self.active = self.advantage > ADVANTAGE * self.error

    def _count_rows(self, outcome: CorrectionOutcome, n: int) -> None:
        self.rows[_PLACE[outcome]] += n

    def snapshot(self) -> CorrectionSnapshot:
        """What it does to the published prediction now."""
        rows = {outcome.value: int(self.rows[place]) for outcome, place in _PLACE.items()}
        factor = math.exp(self.usual) if self.active else 1.0
        return CorrectionSnapshot(learner=RESIDUAL, active=self.active, factor=factor, rows=rows)

    def merged(self, other: Corrector) -> Corrector:
        """One that counts the rows of both and has learned nothing: gradient steps do not add."""
        fresh = Corrector(self._rows_per_s)
        fresh.rows = self.rows + other.rows
        return fresh


def _seconds(end_ns: Ints) -> list[slice]:
    """Rows that end in one second, of rows that end at these times, (n,); who comes late is of the second it is."""
    second = np.maximum.accumulate(end_ns // _STANDS_NS)
    ends = [*((second[1:] > second[:-1]).nonzero()[0] + 1).tolist(), len(second)]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


_PLACE = {outcome: place for place, outcome in enumerate(CorrectionOutcome)}
