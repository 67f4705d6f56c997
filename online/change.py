"""Did the machine change its speed? One sequential test on block medians, over all rows and over those with prefill.

    e    = log(y / (x beta F))            of rows whose batch shape has a reference (online/shapes.py), by the
                                          coefficients and factors from before the row
    v    = 1 / (1 + (r / 0.05)^2)         weight of a row; r: how far the form reaches for it (ShapeFactors.reach)
    m    = weighted median of a block     32 consecutive rows; with prefill 16, less the median e of the others
    b    = m mean(v)                      what a block says: nothing where the form alone says what its work costs
    w   <- w + (1.2533 min(|b|, 3.5 w) - w) / min(k + 16, 256)     what blocks of this machine usually say; k so far
    z    = clip(b / max(w, 4 %), -3.5, 3.5)
    S+   = max(0, S+ + z - 1.5)           S- = max(0, S- - z - 1.5)
    a change is confirmed where S+ or S- reaches 9, log gain = median of m since that sum was last 0, unless that is
    below 6 %; both sums start over

One block adds 2 at most, so that no burst of four blocks is a change, however slow; one of the size of the noise takes
longer. Neighbouring rows share their noise, which w knows and a spread of rows would not. Nothing waits for the
outcome: a few hundred rows of a new speed move references of 256 rows and coefficients of 4,000 little, and after a
confirmed change 2 % of the evidence is left. A change too slow is followed by coefficients, factors and the level.

A window is a row of 32 steps or more, such as two pages tell. Its shape is a mean that no other window may have, and
its noise is that of a block. So e is its log(y / x beta) less the mean over the last 64 windows, v and F are 1, and a
block is 1,024 steps, but 4 windows at least and 32 at most. A window counts as 32 rows since a change. How far the form
is off at another mix, no shape factor tells here, so that a change is confirmed from a factor of 1.25 on.

It began after the block up to which the sum of 0.5 - m / log gain is largest: no change before, and one of this gain
from there on, are then nearest to what was seen.

Where several engines share a configuration, a change is one of all of them, and they must say so:

    a_i  = log y_i - (log x_i beta - log X_c beta)      time of a row, as if its work were the usual of its cell c
    l_k  = median of a_i - Y_c                          level of engine k, over its last 64 rows
    d_k  = l_k - median of the others' l                how much longer it takes than the others, as a log ratio

Y_c and X_c are the cells' references as they are now, the same for all: so engines that speak in turns can be compared.
An engine counts with 16 rows, for ten minutes of event time after its last one. Where several count, a change by a log
gain g is one only if no d_k is beyond log 1.25, and l_k is beyond g / 2 on its side for more than half of them. Two
engines that are a factor of 1.25 apart leave no coefficients that are within a tenth of both. Which term moved is told
by the rows after a change.

Detector ``page_hinkley`` or ``adwin``: River's takes the place of the sums and gets the same z. Its alarm confirms,
with the gain of the last five blocks. It is not saved, and starts over with the process. ``none``: nothing is looked
for. S+ and S- still tell when no change was in sight.
References: Page (Biometrika 1954); Hinkley, Inference about the change-point (Biometrika 1970); Bifet and Gavalda,
ADWIN (SDM 2007).

**Which term moved.** A test of a few one-dimensional alternatives.

    A, b                      weighted statistics of the rows after the change: sum w x x', sum w x y / F
    s = b - A beta            beta, F: coefficients and shape factors from before it, when both sums were last 0
                              under a hypothesis u every row takes c (x u) longer; c is not known:

        all                   u = beta                            every term takes longer alike
        decode                u = beta without prefill columns    all but prefill does
        one column j          u = e_j                             a constant, a prompt token, a token of context, ...

    every   = s'A^-1 s                      what all terms free would explain
    left(u) = every - (u's)^2 / (u'A u)     and what this one leaves of it
    enough  = 2 min left + 9 min(V, 100 min left) + (0.5 %)^2 beta'A beta
    V: variance of a row's relative time, times 32

The hypothesis that leaves least is named where it leaves at most 5 % of ``every``, no other is within ``enough``,
and it moved the way the whole did. Else no term is named: rows of one load do not tell terms apart, and two terms that
moved are none. What is named stays so while it is within ``enough``. By F rows are compared with others of their shape,
so that what the form misses counts little (rows of shapes that hardly were seen, or with work far from theirs, weigh
little). Of engines (online/rls/merging.py) nothing was before: there F is 1, and P and s stand for A and s.

One change is one piece of news: until its term is named, for 8,000 rows at most, what else is confirmed of all rows is
a piece of it, since their gain is no reference for steps that it does not fit. Then shapes take what the term says. A
change back is told as the term that moved before, unless the rows contradict.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .blocks import CELLS, PREFILL_CELL, Design, median_of
from .constants import (
    ENGINES_MAX,
    FEW_ROWS,
    HALF_LIFE_STEPS,
    IDLE_GAP_NS,
    MEAN_ABS_TO_SD,
    MEMORY_ROWS,
    NOISE_ROWS,
    QUIETEST,
    START_ROWS,
    SURE_SD,
    WORTH,
)
from .rows import Floats, Ints
from .shapes import ShapeFactors, shrinkage
from .snapshot import DriftSnapshot
from .state import StateError, Stateful, Tree

# Chosen: on the recordings and on seeds below 200 (tests/bench/learning_drift.py). On eight machines there x1.15 takes
# 206 rows; with 3 for 3.5 266; with 5 % for 4 % 356, and a ramp of x1.3 leaves 1.68 times the error in place of 1.05.
_SLACK, _LIMIT, _Z_MAX, GATE, _USUAL_MIN = 1.5, 9.0, 3.5, 0.06, 0.04
# Chosen: on pages made of c10_long (tests/bench/bench_pages.py). Windows have no shape: no step is in the last cell.
_WINDOW_STEPS, _WINDOWS_MIN, _WINDOW_CELL = NOISE_ROWS**2, FEW_ROWS // 4, CELLS - 1
# Guess: River's detectors do not say since when; of fewer rows without prefill a median says little. With 16 for 8 a
# machine with 22 steps a second has too few of them in a block, and no change of its prefill is found.
_RIVER_BLOCKS, _OTHERS_MIN = 5, 8
DETECTORS = ("cusum", "adwin", "page_hinkley", "none")
# Derived: three terms that did not move take up less than 1 % of the noise once in 3,800 times; then there is none.
_NO_NOISE = 100.0
# Derived: the larger of two times that one coefficient is within a tenth of both is 1.25 of the other.
APART = math.log(1.25)


class Alarm(Stateful):
    """Values of about unit scale in, alarm out: S+ and S- of the module's equations, or River's detector.

    Attributes:
        up, down: the sums.
        rising, falling: values since each was 0.
    """

    SAVED = ("up", "down", "rising", "falling")

    def __init__(self, detector: str) -> None:
        self.up = self.down = 0.0
        self.rising = self.falling = 0
        self._limit = math.inf if detector == "none" else _LIMIT
        self._river: Any = None
        if detector not in ("cusum", "none"):
            self._river = importlib.import_module("online.river").make_detector(detector)

    def update(self, z: float) -> bool:
        """One value; True = alarm."""
        self.up, self.down = max(0.0, self.up + z - _SLACK), max(0.0, self.down - z - _SLACK)
        self.rising = self.rising + 1 if self.up else 0
        self.falling = self.falling + 1 if self.down else 0
        if self._river is not None:
            self._river.update(z)
            return bool(self._river.drift_detected)
        return max(self.up, self.down) >= self._limit

    @property
    def rises(self) -> bool:
        """Whether a sum is above 0."""
        return max(self.up, self.down) > 0.0

    @property
    def memory(self) -> int:
        """Values that may still be asked for: those since a sum was 0, and a few before."""
        return min(max(self.rising, self.falling) + 2 * _RIVER_BLOCKS, MEMORY_ROWS)

    @property
    def lasting(self) -> int:
        """Values since the larger sum was 0."""
        if self._river is not None:
            return _RIVER_BLOCKS
        return self.rising if self.up > self.down else self.falling


class Change(NamedTuple):
    """A confirmed change: log of new time per old time, when it began, and how far that may be off: two blocks.

    Of 86 changes made on c10_long, by 0.7 to 3.3, 78 began within them.
    """

    log_gain: float
    began_ns: int
    within_ns: int
    prefill: bool = False
    """Of the steps with prefill alone."""

    @property
    def gain(self) -> float:
        """New time per old time."""
        return math.exp(self.log_gain)


class ChangeTest(Stateful):
    """The test of the module's equations on one kind of rows.

    Attributes:
        waiting: e, weight and end of rows that do not fill a block yet, (n, 3).
        medians, ends_ns: m and the end of the last blocks.
        mean_abs, blocks: w and k.
        rows: how many are a block.
    """

    SAVED = ("waiting", "medians", "ends_ns", "mean_abs", "blocks", "alarm")

    def __init__(self, detector: str, rows: int) -> None:
        self._detector, self.rows = detector, rows
        self.mean_abs, self.blocks = _USUAL_MIN, 0
        self.restart()

    def restart(self) -> None:
        """Forget what led to an alarm; what is usual stays."""
        self.alarm, self.waiting = Alarm(self._detector), np.empty((0, 3))
        self.medians: list[float] = []
        self.ends_ns: list[float] = []

    def learn(self, e: Floats, weight: Floats, end_ns: Ints) -> Change | None:
        """Rows in order of time, (n,) each; rows after a confirmed change are left."""
        rows = np.concatenate([self.waiting, np.column_stack((e, weight, end_ns))])
        count = len(rows) // self.rows
        self.waiting = rows[count * self.rows :]
        blocks = rows[: count * self.rows].reshape(count, self.rows, 3)
        for block, share in zip(blocks, blocks[:, :, 1].mean(axis=1).tolist(), strict=True):
            below = block[block[:, 0].argsort(), :2]
            median = below[np.searchsorted(below[:, 1].cumsum(), 0.5 * share * self.rows), 0]
            if change := self._test(float(median), share, float(block[-1, 2])):
                return change
        return None

    def _test(self, m: float, share: float, end_ns: float) -> Change | None:
        said, scale = share * m, max(self.mean_abs, _USUAL_MIN)
        rate = 1.0 / min(self.blocks + FEW_ROWS, MEMORY_ROWS)
        self.mean_abs += rate * (MEAN_ABS_TO_SD * min(abs(said), _Z_MAX * self.mean_abs) - self.mean_abs)
        self.blocks += 1
        alarm, memory = self.alarm.update(min(max(said / scale, -_Z_MAX), _Z_MAX)), self.alarm.memory
        self.medians, self.ends_ns = [*self.medians, m][-memory:], [*self.ends_ns, end_ns][-memory:]
        if not alarm:
            return None
        gain, medians, ends_ns = median_of(self.medians[-self.alarm.lasting :]), self.medians, self.ends_ns
        self.restart()
        if abs(gain) < GATE:
            return None
        last = int(np.cumsum(0.5 - np.array(medians[:-1]) / gain).argmax()) if len(medians) > 1 else 0
        block_ns = (ends_ns[-1] - ends_ns[last]) / max(len(ends_ns) - 1 - last, 1)
        return Change(gain, round(ends_ns[last]), max(round(2.0 * block_ns), 0))  # a clock may go back


class WindowTest(Stateful):
    """The test on windows.

    Attributes:
        test: of the equations.
        mean, count: of log(y / x beta) of the windows since the last change, and how many there were.
        before: what the mean was before that change.
    """

    SAVED = ("test", "mean", "count", "before")

    def __init__(self, detector: str) -> None:
        self.test = ChangeTest(detector, NOISE_ROWS)
        self.mean, self.count, self.before = 0.0, 0, 0.0

    def restart(self) -> None:
        """Learn anew what is usual, since a change was confirmed."""
        self.test.restart()
        self.mean, self.count, self.before = 0.0, 0, self.mean

    def learn(self, log_ratio: Floats, steps: Ints, end_ns: Ints) -> Change | None:
        """Windows in order of time, (n,) each, with log(y / x beta); while a change is in sight the mean stays."""
        e = log_ratio - self.mean
        for value in () if self.test.alarm.rises else log_ratio.tolist():
            self.count += 1
            self.mean += (value - self.mean) / min(self.count, 2 * NOISE_ROWS)
        self.test.rows = min(max(_WINDOW_STEPS // int(steps.mean()), _WINDOWS_MIN), NOISE_ROWS)
        return self.test.learn(e, np.ones(len(e)), end_ns) if self.count >= FEW_ROWS else None


# ------------------------------------------------------------------- engines that must agree


class OutlierEngine(NamedTuple):
    """The engine that differs most, by its number, and its time per time of the others."""

    number: int
    ratio: float

    @property
    def differs(self) -> bool:
        """Whether it is so far from the others that one set of coefficients cannot do for all."""
        return abs(math.log(self.ratio)) > APART


class EngineRows(Stateful):
    """What one engine sent, of p columns.

    Attributes:
        cell, log_y: of its last rows, oldest first: cell and a_i, (n,) each.
        last_ns: event time of its last block.
        learned: how many rows are in a (p, p) and b (p,), the statistics A and b of "Which term moved".
        learned_ns: event time of the last of them; a row counts half after ten minutes, the same of every engine.
    """

    SAVED = ("cell", "log_y", "last_ns", "learned", "learned_ns", "a", "b")

    def __init__(self, p: int) -> None:
        self.cell, self.log_y, self.last_ns = np.empty(0, np.int64), np.empty(0), 0
        self.forget(p)

    def forget(self, p: int) -> None:
        """Begin anew with the statistics."""
        self.learned, self.learned_ns, self.a, self.b = 0, 0, np.zeros((p, p)), np.zeros(p)

    def restored(self) -> None:
        """Each row is of a cell."""
        if ((self.cell < 0) | (self.cell >= CELLS)).any() or len(self.cell) != len(self.log_y):
            raise StateError("rows of an engine without their cells")

    def add(self, x: Floats, elapsed_us: Floats, weight: Floats, end_ns: int) -> None:
        """Add rows x (n, p) of these times and weights (n,) to the statistics."""
        left = 0.5 ** (max(end_ns - self.learned_ns, 0) / IDLE_GAP_NS)
        weighted = weight[:, None] * x
        self.a, self.b = left * self.a + weighted.T @ x, left * self.b + weighted.T @ elapsed_us
        self.learned, self.learned_ns = self.learned + len(x), end_ns

    def level(self, reference: Floats, first_cell: int) -> float:
        """Median beside what their cells usually take, (512,), of cells from one on; 0 where there is none."""
        of = self.cell >= first_cell
        return median_of((self.log_y - reference[self.cell])[of]) if of.any() else 0.0


class Engines(Stateful):
    """The engines of one configuration, by the numbers that rows bear; ``p``: columns of a row.

    Attributes:
        rows: of those that count, or will with more rows.
    """

    def __init__(self, p: int) -> None:
        self._p = p
        self.rows: dict[int, EngineRows] = {}

    def to_state(self) -> Tree:
        """See Stateful."""
        return {str(number): rows.to_state() for number, rows in self.rows.items()}

    def from_state(self, state: Tree) -> None:
        """See Stateful."""
        self.rows = {int(number): EngineRows(self._p) for number in state}
        for number, rows in self.rows.items():
            rows.from_state(state[str(number)])

    def learn(self, engine: Ints, cell: Ints, log_y: Floats, end_ns: int) -> None:
        """Rows of a block, (n,) each, in order of time."""
        for number in set(engine.tolist()):
            own, rows = engine == number, self.rows.setdefault(number, EngineRows(self._p))
            rows.cell = np.append(rows.cell, cell[own])[-2 * NOISE_ROWS :]
            rows.log_y = np.append(rows.log_y, log_y[own])[-2 * NOISE_ROWS :]
            rows.last_ns = end_ns
        heard = sorted(self.rows.items(), key=lambda each: each[1].last_ns)[-ENGINES_MAX:]
        self.rows = {number: rows for number, rows in heard if rows.last_ns >= end_ns - IDLE_GAP_NS}

    def add(self, block: Design, elapsed_us: Floats, weight: Floats) -> None:
        """Rows of a block with times and weights (n,), to their engines' statistics; of a lone engine nobody asks."""
        for number, rows in self.rows.items() if len(self.rows) > 1 else ():
            own = block.engine == number
            if own.any():
                rows.add(block.x[own], elapsed_us[own], weight[own], int(block.end_ns[-1]))

    def outlier(self, reference: Floats) -> OutlierEngine | None:
        """The one that differs most, by what cells usually take, (512,); None where fewer than two count."""
        levels = self._levels(reference, 0)
        if len(levels) < 2:  # noqa: PLR2004 -- an engine and another one
            return None
        beside = {
            number: level - median_of([other for each, other in levels.items() if each != number])
            for number, level in levels.items()
        }
        number = max(beside, key=lambda each: (abs(beside[each]), beside[each]))
        return OutlierEngine(number, math.exp(beside[number]))

    def confirm(self, gain: float, reference: Floats, first_cell: int = 0) -> bool:
        """Whether a change by this log gain, of cells from one on, is one of most of them and leaves them alike."""
        odd = self.outlier(reference)
        if odd is None:
            return True
        sign, levels = math.copysign(1.0, gain), self._levels(reference, first_cell).values()
        showing = sum(sign * level > 0.5 * abs(gain) for level in levels)
        return not odd.differs and 2 * showing > len(levels)

    def _levels(self, reference: Floats, first_cell: int) -> dict[int, float]:
        counting = ((number, rows) for number, rows in self.rows.items() if len(rows.cell) >= FEW_ROWS)
        return {number: rows.level(reference, first_cell) for number, rows in counting}


# ------------------------------------------------------------------- the monitor


class ChangeMonitor(Stateful):
    """Watches the speed of one target.

    Attributes:
        all_rows, prefill, windows: the tests.
        engines: the levels of those that sent rows lately.
        gain: new time per old time of the last confirmed change.
        confirmed: how many there were.
        last_ns: event time at which the last one was confirmed; 0 before.
        began_ns, within_ns: when it began, and how far that may be off.
        rows_since: rows since then.
        of_prefill: whether it is of steps with prefill alone.
        asks: for how many more rows its term is looked for.
        before, reference: coefficients (p,) and factors from before it.
        a, b: statistics of the rows since then, (p, p) and (p,).
        calm_beta, calm: coefficients and factors when no change was in sight last.
        term: what moved in it; empty while that is not sure.
        added: by how much; 0 where that is not known.
    """

    SAVED = (
        *("all_rows", "prefill", "windows", "engines", "gain", "confirmed", "last_ns", "began_ns", "within_ns"),
        *("rows_since", "asks", "of_prefill", "before", "reference", "calm_beta", "calm", "a", "b", "term", "added"),
    )

    def __init__(self, detector: str, names: Sequence[str]) -> None:
        self._detector, self._names, self.before = detector, tuple(names), np.zeros(len(names))
        self.all_rows, self.prefill = ChangeTest(detector, NOISE_ROWS), ChangeTest(detector, FEW_ROWS)
        self.windows, self.engines = WindowTest(detector), Engines(len(names))
        self.gain, self.confirmed, self.last_ns, self.rows_since = 1.0, 0, 0, 0
        self.began_ns = self.within_ns = 0
        self.asks, self.of_prefill = 0, False
        self.reference, self.calm = ShapeFactors(len(names)), ShapeFactors(len(names))
        self.calm_beta = np.zeros(len(names))
        self.a, self.b = np.zeros((len(names), len(names))), np.zeros(len(names))
        self.term, self.added = "", 0.0

    def restarted(self) -> ChangeMonitor:
        """One that has seen no change."""
        return ChangeMonitor(self._detector, self._names)

    def learn(self, block: Design, log_ratio: Floats, shapes: ShapeFactors, beta: Floats) -> Change | None:
        """One block, its log(y / x beta) (n,), and the factors and coefficients from before it."""
        is_window = block.steps >= NOISE_ROWS
        rows = len(block) + (NOISE_ROWS - 1) * int(is_window.sum())
        self.rows_since, self.asks = self.rows_since + rows, max(self.asks - rows, 0)
        if is_window.all():
            return self._learn_windows(block, log_ratio, shapes, beta)
        known = shapes.knows(block.cell)
        if not known.any():
            return None
        if not (self.all_rows.alarm.rises or self.prefill.alarm.rises):
            self.calm_beta = beta[: len(self._names)].copy()
            self.calm = shapes.without_phases(beta, len(self._names))
        cell, end_ns = block.cell[known], block.end_ns[known]
        log_ratio, usual = log_ratio[known], shapes.mean_log_ratio(cell, beta)
        e = log_ratio - usual * shrinkage(shapes.rows[cell])
        weight = 1.0 / (1.0 + np.square(shapes.reach(cell, block.x[known], beta) / WORTH))
        self.engines.learn(block.engine[known], cell, log_ratio - usual + shapes.log_y[cell], int(block.end_ns[-1]))
        change, with_prefill = self.all_rows.learn(e, weight, end_ns), cell >= PREFILL_CELL
        if change and self.engines.confirm(change.log_gain, shapes.log_y):
            return self._confirm(change, int(block.end_ns[-1]))
        others = e[~with_prefill]
        if self._settles or len(others) < _OTHERS_MIN:
            return None
        beside = e[with_prefill] - median_of(others)
        change = self.prefill.learn(beside, weight[with_prefill], end_ns[with_prefill])
        if change and self.engines.confirm(change.log_gain, shapes.log_y, PREFILL_CELL):
            return self._confirm(change._replace(prefill=True), int(block.end_ns[-1]))
        return None

    def _learn_windows(self, block: Design, log_ratio: Floats, shapes: ShapeFactors, beta: Floats) -> Change | None:
        if not self.windows.test.alarm.rises:
            self.calm_beta, self.calm = beta[: len(self._names)].copy(), ShapeFactors(len(self._names))
        cell, end_ns = np.full(len(block), _WINDOW_CELL), int(block.end_ns[-1])
        self.engines.learn(block.engine, cell, log_ratio - self.windows.mean + shapes.log_y[cell], end_ns)
        change = self.windows.learn(log_ratio, block.steps, block.end_ns)
        if change and abs(change.log_gain) >= APART and self.engines.confirm(change.log_gain, shapes.log_y):
            return self._confirm(change, end_ns)
        return None

    def add(self, block: Design, elapsed_us: Floats, weight: Floats) -> None:
        """Rows that are learned, with times and weights (n,): what tells which term moved, and which engine differs."""
        self.engines.add(block, elapsed_us, weight)
        if self.asks:
            then, cell, is_window = self.reference, block.cell, block.steps >= NOISE_ROWS
            trust = shrinkage(then.rows[cell]) / (1.0 + np.square(then.reach(cell, block.x, self.before) / WORTH))
            log_f = np.where(is_window, self.windows.before, then.log_factors(cell, self.before))
            weighted = (weight * np.where(is_window, 1.0, trust))[:, None] * block.x
            self.a += weighted.T @ block.x
            self.b += weighted.T @ (elapsed_us * np.exp(-log_f))

    def _confirm(self, change: Change, end_ns: int) -> Change:
        is_alike, log_gain = change.prefill == self.of_prefill, change.log_gain
        goes_on = is_alike and (self._settles or (self.asks > 0 and not self.term))
        if goes_on and abs(math.log(self.gain) + log_gain) >= GATE:
            log_gain += math.log(self.gain)  # a piece of the same change
        else:
            self.before, self.reference = self.calm_beta, self.calm
            is_over = goes_on and self._settles  # before it had a term
            self.asks = 0 if is_over else 2 * HALF_LIFE_STEPS
            self.of_prefill = change.prefill
            self.began_ns, self.within_ns = max(change.began_ns, self.last_ns + 1), change.within_ns
            self.confirmed += 1
            is_back = is_alike and abs(math.log(self.gain) + change.log_gain) < GATE
            self.term, self.added = self.term * is_back, 0.0
        self.gain, self.last_ns, self.rows_since = math.exp(log_gain), end_ns, 0
        for rows in self.engines.rows.values():
            rows.forget(len(self._names))
        self.a, self.b = np.zeros_like(self.a), np.zeros_like(self.b)
        if change.prefill:
            self.term = next((name for name in self._names if is_of_prefill(name)), "")
        self.prefill.restart()
        self.windows.restart()
        return change

    @property
    def _settles(self) -> bool:
        """Whether too few rows came since the last change: two first fits, since fewer are of one load."""
        return self.confirmed > 0 and self.rows_since < 2 * START_ROWS

    def attribute(self, scale: float, shapes: ShapeFactors, beta: Floats) -> None:
        """Tell which term moved, and by how much, once enough rows came; what moves after two half-lives is another.

        ``scale``: relative noise of a row; ``shapes``, ``beta``: factors and coefficients as they are.
        """
        if not self.asks or self.rows_since < 2 * START_ROWS:
            return
        slower, noise = self.gain > 1.0, (1 if self.windows.count else NOISE_ROWS) * scale**2
        s = self.b - self.a @ self.before
        moved = moved_term(self.a, s, self.before, self._names, slower=slower, noise=noise, expected=self.term)
        if moved.name and (is_of_prefill(moved.name) or not self.of_prefill):
            is_new = moved.name != self.term or not self.added
            self.term, self.added = moved
            if is_new and moved.name != EVERY_TERM:  # which the gain of all rows fits
                moves = dict(_hypotheses(self.before, self._names))[moved.name]
                shapes.follow(self.reference, self.before, self.before + moved.added * moves, beta)

    def outlier_engine(self, shapes: ShapeFactors) -> OutlierEngine | None:
        """The engine that differs most from the others of its configuration; None where fewer than two count."""
        return self.engines.outlier(shapes.log_y)

    def snapshot(self, shapes: ShapeFactors) -> DriftSnapshot:
        """The confirmed changes; a suspicion is not published."""
        began_ns, gain = (self.began_ns, self.gain) if self.confirmed else (None, None)
        odd = self.outlier_engine(shapes)
        return DriftSnapshot(
            last_unix_nano=began_ns,
            last_within_s=self.within_ns / 1e9 if self.confirmed else None,
            gain=gain,
            count=self.confirmed,
            term=self.term,
            added=self.added or None,
            engines_apart=None if odd is None else odd.ratio,
        )


EVERY_TERM, DECODE = "all", "decode"


class MovedTerm(NamedTuple):
    """The term: ``all``, ``decode`` or the name of a column; empty where nothing is known.

    ``added``: microseconds per unit of the column; of ``all`` and ``decode``, the share of what they were.
    """

    name: str
    added: float


def moved_term(
    a: Floats,
    s: Floats,
    beta: Floats,
    names: Sequence[str],
    *,
    slower: bool,
    noise: float,
    expected: str = "",
) -> MovedTerm:
    """The one term that explains why rows take more time, or less, than by ``beta``; see the module's docstring.

    Args:
        a: A, how surely the rows tell coefficients, (p, p).
        s: how much more time they take, (p,).
        beta: coefficients that they are compared with, (p,).
        names: of the columns.
        slower: whether they take more time on the whole; a term that fell explains no slower steps.
        noise: V, variance of a row's relative time, as if rows did not share theirs.
        expected: what is told if several explain it, and this is one of them.
    """
    squares = float(beta @ a @ beta)
    every = float(s @ np.linalg.lstsq(a, s, rcond=None)[0])
    found = [(every, MovedTerm("", 0.0))]
    for name, u in _hypotheses(beta, names):
        along, length = float(u @ s), float(u @ a @ u)
        if length > 0.0:
            found.append((every - along * along / length, MovedTerm(name, along / length)))
    least = min(left for left, _ in found)
    more = least + SURE_SD**2 * min(noise, _NO_NOISE * least) + QUIETEST**2 * squares
    told = {term.name: term for left, term in found if left - least <= more}
    term = told.get(expected, min(found)[1])
    is_sure = least <= WORTH * every and (len(told) == 1 or term.name == expected)
    return term if is_sure and (term.added > 0.0) == slower else MovedTerm("", 0.0)


def is_of_prefill(name: str) -> bool:
    """Whether a column, or a term, is about prefill."""
    return name.startswith("prefill")


def _hypotheses(beta: Floats, names: Sequence[str]) -> Iterator[tuple[str, Floats]]:
    """Name and direction u (p,) of each, the plain ones first."""
    yield EVERY_TERM, beta
    of_prefill = np.array([*map(is_of_prefill, names)])
    if beta[of_prefill].any():
        yield DECODE, np.where(of_prefill, 0.0, beta)
    for index, name in enumerate(names):
        yield name, np.eye(len(names))[index]
