"""Did the machine change its speed? One sequential test on block medians, over all rows and over those with prefill.

    e    = log(y / (x beta F))            of rows whose batch shape has a reference (online/shapes.py), by the
                                          coefficients and factors from before the row
    v    = 1 / (1 + (r / 0.05)^2)         weight of a row; r: how far the form reaches for it (ShapeFactors)
    m    = weighted median of a block     32 consecutive rows; with prefill 16, less the median e of the others
    b    = m mean(v)                      what a block says: nothing where the form alone says what its work costs
    z    = clip(b / max(w, 4 %), -3.5, 3.5)
    w   <- w + (1.2533 min(|b|, 3.5 w) - w) / min(k + 16, 256)     what blocks of this machine usually say; k so far
    S+   = max(0, S+ + z - 1.5)           S- = max(0, S- - z - 1.5)
    a change is confirmed where S+ or S- reaches 9; it began with the block from which on that sum was the larger one,
    its log time ratio is the median of m since, unless that is below 6 %; both sums start over

One block adds 2 at most, so that no burst of four blocks is a change, however slow; one of the size of the noise takes
longer. Neighbouring rows share their noise, which w knows and a spread of rows would not: with 4 % in place of w, the
recording c3 reports a change that is none. With 1 in place of v, machines that no line fits report five in 120,000 rows
(tests/bench/learning_drift.py). Nothing waits for the outcome: a few hundred rows of a new speed move references of 256
rows and coefficients of 4,000 little, and after a confirmed change 2 % of the evidence is left. A change too slow is
followed by coefficients, factors and the level.

A window is what two pages tell, or a row of 32 steps or more. Its shape is a mean that no other window may have, and
its noise is that of a block. So e is its log(y / x beta) less the mean over the last 64 windows, v and F are 1, and a
block is 512 steps, where windows of several requests share theirs, but 32 windows at most. How far the form is off at
another mix, no shape factor tells here, so that a change is confirmed from a factor of 1.25 on, 4 % is 15 %, and 1.5 is
1.25. With 1 another mix of c10_long is reported. Coefficients follow windows within minutes: while a sum rises, x beta
is by those from before. A window counts as 32 rows since a change.

Where several engines share a configuration, they must agree (online/engines.py). Until they do, the sums stay at 9 and
are tested again. The rows after a change show which term moved (online/moved_term.py).

Detector ``page_hinkley`` or ``adwin``: River's detector takes the place of the sums and gets the same z. Its alarm
confirms. It is not saved, and starts over with the process. ``none``: no change is looked for. S+ and S- still run:
they show since when a change is in sight.
References: Page (Biometrika 1954); Hinkley, Inference about the change-point (Biometrika 1970); Bifet and Gavalda,
ADWIN (SDM 2007).

A change is reported once. Until its term is named, for 8,000 rows at most, a further change of all rows is a part of
it, since the ratio of all rows is no reference for steps that it does not fit. Then shapes take what the term says. A
change back is named after the term that moved before, unless the rows name another.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .blocks import CELLS, PREFILL_CELL, Design, median_of
from .constants import (
    APART,
    FEW_ROWS,
    HALF_LIFE_STEPS,
    MEAN_ABS_TO_SD,
    MEMORY_ROWS,
    NOISE_ROWS,
    TINY_US,
)
from .engines import Engines
from .moved_term import EVERY_TERM, NOT_PREFILL, Reference, TermSearch, is_of_prefill
from .rows import Floats, Ints
from .shapes import ShapeFactors, shrinkage
from .snapshot import DriftSnapshot
from .state import Stateful

# Chosen: on the recordings and on seeds below 200 (tests/bench/learning_drift.py). On eight machines there x1.15 takes
# 206 rows; with 3 for 3.5 266; with 5 % for 4 % 356, and a ramp of x1.3 leaves 1.68 times the error in place of 1.05.
_SLACK, _LIMIT, _Z_MAX, _USUAL_MIN = 1.5, 9.0, 3.5, 0.04
# Derived: a block that says less raises no sum.
EFFECT_MIN = _SLACK * _USUAL_MIN
# Chosen: on pages made of c10_long (tests/bench/bench_pages.py). With 256 steps a change is reported that is none.
_WINDOW_STEPS, _WINDOW_SLACK = 512, 1.25
# Windows have no shape: no step is in the last cell.
_WINDOW_CELL = CELLS - 1
# Guess: of fewer rows without prefill a median says little. With 16 a machine with 22 steps a second has too few of
# them in a block, and no change of its prefill is found.
_OTHERS_MIN = 8
DETECTORS = ("cusum", "adwin", "page_hinkley", "none")


class Change(NamedTuple):
    """A confirmed change: log(new time / old time), when it began, and how far that may be off, which is two blocks.

    Of 86 changes by 0.7 to 3.3 that were made on c10_long, 78 began within that time.
    """

    log_time_ratio: float
    began_ns: int
    within_ns: int
    prefill: bool = False
    """Whether only the steps with prefill changed."""

    @property
    def time_ratio(self) -> float:
        """New time per old time."""
        return math.exp(self.log_time_ratio)

    @property
    def sure_ns(self) -> int:
        """Event time after which all rows have the new speed."""
        return self.began_ns + self.within_ns


class ChangeTest(Stateful):
    """The test of the module's equations on one kind of rows.

    Attributes:
        waiting: e, weight and end of rows that do not fill a block yet, (n, 3).
        up, down: S+ and S-.
        medians: m of the blocks since the larger one is it.
        began_ns: end of the first row of these.
        mean_abs, blocks: w and k.
        rows: how many are a block.
    """

    SAVED = ("waiting", "up", "down", "medians", "began_ns", "mean_abs", "blocks")

    def __init__(self, detector: str, rows: int, dead_band: float = _SLACK, least: float = EFFECT_MIN) -> None:
        self._detector, self.rows, self._dead_band, self._least = detector, rows, dead_band, least
        self._limit, self._usual_min = math.inf if detector == "none" else _LIMIT, least / _SLACK
        self.mean_abs, self.blocks = self._usual_min, 0
        self.restart()

    def restart(self) -> None:
        """Reset sums and medians; the usual scale of a block stays."""
        self.waiting, self.medians = np.empty((0, 3)), list[float]()
        self.up = self.down = self.began_ns = 0.0
        self._river: Any = None
        if self._detector not in ("cusum", "none"):
            self._river = importlib.import_module("online.river").make_detector(self._detector)

    @property
    def rises(self) -> bool:
        """Whether a change is in sight."""
        return max(self.up, self.down) > 0.0

    def learn(self, e: Floats, weight: Floats, end_ns: Ints) -> Change | None:
        """Learn rows in order of time, (n,) each; return the first change, again at each call until :meth:`restart`."""
        rows = np.concatenate([self.waiting, np.column_stack((e, weight, end_ns))])
        count = len(rows) // self.rows
        self.waiting = rows[count * self.rows :]
        blocks = rows[: count * self.rows].reshape(count, self.rows, 3)
        for block, share in zip(blocks, blocks[:, :, 1].mean(axis=1).tolist(), strict=True):
            below = block[block[:, 0].argsort(), :2]
            median = below[np.searchsorted(below[:, 1].cumsum(), 0.5 * share * self.rows), 0]
            first_ns, last_ns = block[[0, -1], 2].tolist()
            if self._alarms(float(median), share, first_ns):
                gain, block_ns = median_of(self.medians), (last_ns - self.began_ns) / len(self.medians)
                if abs(gain) >= self._least:
                    return Change(gain, round(self.began_ns), max(round(2.0 * block_ns), 0))  # a clock may go back
                self.restart()
        return None

    def _alarms(self, m: float, share: float, first_ns: float) -> bool:
        said, scale = share * m, max(self.mean_abs, self._usual_min)
        rate = 1.0 / min(self.blocks + FEW_ROWS, MEMORY_ROWS)
        self.mean_abs += rate * (MEAN_ABS_TO_SD * min(abs(said), _Z_MAX * self.mean_abs) - self.mean_abs)
        self.blocks += 1
        z, before = min(max(said / scale, -_Z_MAX), _Z_MAX), self.up - self.down
        self.up = min(max(0.0, self.up + z - self._dead_band), self._limit)
        self.down = min(max(0.0, self.down - z - self._dead_band), self._limit)
        if before * (self.up - self.down) <= 0.0:
            self.medians, self.began_ns = [], first_ns
        self.medians = [*self.medians, m][-MEMORY_ROWS:]
        if self._river is not None:
            self._river.update(z)
            return bool(self._river.drift_detected)
        return max(self.up, self.down) >= self._limit


# ------------------------------------------------------------------- the monitor


class ChangeMonitor(Stateful):
    """Watches the speed of one target, and keeps the news of its last change.

    Attributes:
        all_rows, prefill, windows: the tests.
        usual_window, window_count: mean of log(y / x beta) of the windows since the last change, and how many came.
        engines: the levels of those that sent rows lately.
        reference: what rows took when no change was in sight last.
        search: for the term that moved.
        gain: new time per old time of the last confirmed change.
        confirmed: how many there were.
        last_ns: event time at which the last one was confirmed; 0 before.
        began_ns, within_ns: when it began, and how far that may be off.
        of_prefill: whether it is of steps with prefill alone.
        term: what moved in it; empty while that is not sure.
        added: by how much; 0 where that is not known.
    """

    SAVED = (
        *("all_rows", "prefill", "windows", "usual_window", "window_count", "engines", "reference", "search", "gain"),
        *("confirmed", "last_ns", "began_ns", "within_ns", "of_prefill", "term", "added"),
    )

    def __init__(self, detector: str, names: Sequence[str]) -> None:
        self._detector, self._names = detector, tuple(names)
        self.all_rows, self.prefill = ChangeTest(detector, NOISE_ROWS), ChangeTest(detector, FEW_ROWS)
        self.windows, self.engines = ChangeTest(detector, NOISE_ROWS, _WINDOW_SLACK, APART), Engines(len(names))
        self.usual_window, self.window_count = 0.0, 0
        self.reference, self.search = Reference(len(names)), TermSearch(len(names))
        self.gain, self.confirmed = 1.0, 0
        self.last_ns = self.began_ns = self.within_ns = 0
        self.of_prefill, self.term, self.added = False, "", 0.0

    def without_changes(self) -> ChangeMonitor:
        """A new monitor with the same settings."""
        return ChangeMonitor(self._detector, self._names)

    # ---------------------------------------------------------------- looking for a change

    def learn(self, block: Design, log_ratio: Floats, shapes: ShapeFactors, beta: Floats) -> Change | None:
        """Test one block by its log(y / x beta) (n,), and by the factors and coefficients from before it."""
        windows = block.windows
        self.search.count(len(block) + (NOISE_ROWS - 1) * int(windows.sum()))
        if windows.all():
            return self._learn_windows(block, shapes, beta)
        known = shapes.knows(block.cell)
        if not known.any():
            return None
        if not (self.all_rows.rises or self.prefill.rises):
            self.reference.beta, self.reference.factors = beta.copy(), copy.deepcopy(shapes)
        cell, end_ns = block.cell[known], block.end_ns[known]
        log_ratio, usual = log_ratio[known], shapes.mean_log_ratio(cell, beta)
        e = log_ratio - usual * shrinkage(shapes.rows[cell])
        weight = shapes.comparability(cell, block.x[known], beta)
        log_y = log_ratio - usual + shapes.log_y[cell]
        e = self.engines.learn(block.engine[known], cell, log_y, e, int(block.end_ns[-1]))
        change = self._take_if_shared(self.all_rows.learn(e, weight, end_ns), shapes, int(block.end_ns[-1]))
        with_prefill = cell >= PREFILL_CELL
        others = e[~with_prefill]
        if change is not None or len(others) < _OTHERS_MIN:
            return change
        beside = e[with_prefill] - median_of(others)
        found = self.prefill.learn(beside, weight[with_prefill], end_ns[with_prefill])
        return self._take_if_shared(found and found._replace(prefill=True), shapes, int(block.end_ns[-1]))

    def _learn_windows(self, block: Design, shapes: ShapeFactors, beta: Floats) -> Change | None:
        is_calm = not self.windows.rises
        if is_calm:
            self.reference.beta, self.reference.factors = beta.copy(), ShapeFactors(len(beta))
            self.reference.window_log_ratio = self.usual_window
        before_us = block.x @ self.reference.beta[: block.x.shape[1]]
        log_ratio = np.log(block.elapsed_us / np.maximum(before_us, TINY_US))
        e = log_ratio - self.usual_window
        for value in log_ratio.tolist() if is_calm else ():
            self.window_count += 1
            self.usual_window += (value - self.usual_window) / min(self.window_count, 2 * NOISE_ROWS)
        cell, end_ns = np.full(len(block), _WINDOW_CELL), int(block.end_ns[-1])
        e = self.engines.learn(block.engine, cell, e, e, end_ns)
        if self.window_count < FEW_ROWS:
            return None
        self.windows.rows = min(math.ceil(_WINDOW_STEPS / float(block.steps @ block.weight) * len(e)), NOISE_ROWS)
        return self._take_if_shared(self.windows.learn(e, np.ones(len(e)), block.end_ns), shapes, end_ns)

    # ---------------------------------------------------------------- the news of a change

    def _take_if_shared(self, change: Change | None, shapes: ShapeFactors, end_ns: int) -> Change | None:
        """Record a change that most engines show, as a new one or as a part of the last one; None where they do not.

        It is a part if it is of the same rows, and the term of the last change is still looked for. The two together
        are one change by the product of their ratios. Where that product is no change any more, the last change is
        over.
        """
        if change is None or not self.engines.confirm(change, shapes.log_y):
            return None
        log_time_ratio, of_same_rows = math.log(self.gain) + change.log_time_ratio, change.prefill == self.of_prefill
        is_open = self.search.rows_left > 0 and self.term in ("", NOT_PREFILL)
        is_back = abs(log_time_ratio) < EFFECT_MIN
        began_ns = max(change.began_ns, self.last_ns + 1)
        if is_back or not (is_open and of_same_rows):
            log_time_ratio, self.search.reference = change.log_time_ratio, copy.copy(self.reference)
            self.search.rows_left = 2 * HALF_LIFE_STEPS
            self.began_ns, self.within_ns = began_ns, change.within_ns
            self.confirmed, self.of_prefill = self.confirmed + 1, change.prefill
            self.term, self.added = self.term if of_same_rows and is_back else "", 0.0
        self.gain, self.last_ns = math.exp(log_time_ratio), end_ns
        if change.prefill:
            self.term = next((name for name in self._names if is_of_prefill(name)), "")
        self.search.start(began_ns + change.within_ns)
        for rows in self.engines.rows.values():
            rows.forget(len(self._names))
        self.prefill.restart()
        self.windows.restart()
        self.usual_window, self.window_count = 0.0, 0
        if not change.prefill:
            self.all_rows.restart()
        return change

    def add(self, block: Design, elapsed_us: Floats, weight: Floats) -> None:
        """Add learned rows with times and weights (n,). They show which term moved, and which engine differs."""
        self.engines.add(block, elapsed_us, weight)
        self.search.add(block, elapsed_us, weight)

    def find_term(self, scale: float, shapes: ShapeFactors) -> None:
        """Name the term that moved, and by how much, once rows show it, within two half-lives of the change.

        ``scale``: relative noise of a row; ``shapes``: factors as they are.
        """
        moved = self.search.find(self._names, scale, slower=self.gain > 1.0)
        is_vaguer = moved.name == NOT_PREFILL and self.term != ""
        if moved.name and not is_vaguer and (is_of_prefill(moved.name) or not self.of_prefill):
            is_new = moved.name != self.term or not self.added
            self.term, self.added = moved
            if is_new and moved.name not in (EVERY_TERM, NOT_PREFILL):  # the ratio of all rows fits these
                reference, after = self.search.reference, self.search.coefficients_after(moved, self._names)
                shapes.follow_coefficients(reference.factors, reference.beta, after)

    # ---------------------------------------------------------------- reading

    def snapshot(self) -> DriftSnapshot:
        """The confirmed changes; a suspicion is not published."""
        began_ns, gain = (self.began_ns, self.gain) if self.confirmed else (None, None)
        return DriftSnapshot(
            last_unix_nano=began_ns,
            last_within_s=self.within_ns / 1e9 if self.confirmed else None,
            gain=gain,
            count=self.confirmed,
            term=self.term,
            added=self.added or None,
        )
