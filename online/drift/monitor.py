"""Did the machine change its speed, or only its mix of work? Compare like with like.

A linear form never fits a machine exactly, so a change of mix moves its residuals as a change of speed would. Each
cell c (batch shape: online/blocks.py) therefore has a reference of its own, and a row is compared with its own cell:

    e_i = (log y_i - Y_c) - (log x_i beta - log X_c beta)          Y_c: mean log y, X_c: mean x (p,) of the cell
    s_i = hypot(s_c, 0.7 d_i)                                      s_c: mean |e| of the cell x 1.2533, 0.5 % at least
    u_i = clip(e_i / s_i, -8, 8)                                   d_i: the largest d_ij of the columns j
    d_ij = max(0, |log(x_ij / X_cj)| - 0.35)                       how far its work is from usual
    v_i = clip(e_i / hypot(s_c, min(0.7 d_i, 0.2 f_i)), -8, 8)     f_i: sum_j d_ij |beta_j (x_ij - X_cj)| / x_i beta

beta enters only through the difference between the row's work and the cell's usual work, so that neither misfit of
the form nor learning of beta shows in e; where that difference is large, the form alone says what it costs, and the
row counts less. For a first alarm it does only as far as that work makes up the step's time: halved contexts that are
a fifth of it hide no slow-down. For what lasts and for what is believed it does in any case: f knows no more than beta
what bent contexts cost, nor (f_i infinite) what a mean over many steps hides. A cell with fewer than 16 rows has no
reference yet: there the row is compared with the fit, and s_i is twice the fit's scale, times how far outside of what
it has seen the fit is asked (sqrt of the leverage in units of its mean).

    fast   medians of 8 v, two-sided CUSUM with slack 1.75, limit 14    what stands out of single rows (detectors.py)
    slow   levels of 32 u in units of their usual size, slack 1, limit 6   what lasts (levels.py)
    gate   no alarm while the median of the last 16 (slow: 64) e is below 6 %

An alarm is a suspicion: the learner predicts by it at once, and learns on the side. References stay as they were until
the rows after it have confirmed or refuted it (suspicion.py), and where there are several engines most of them
(engines.py). A change that is too slow for either moves all references
along with the rows, with a memory of 2048 rows. Without a detector (``none``) references are learned, and nothing is
looked for. References: Page (Biometrika 1954).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np

from online.blocks import CELLS, PREFILL_CELL, Groups, stable_order
from online.rows import Floats, Ints, Mask
from online.snapshot import DriftSnapshot
from online.state import Count, Finite, LikeFresh, MadeBy, saved

from .cells import CellRows, Cells, SpeedFit
from .detectors import NO_DETECTOR, U_MAX, DriftSettings, make_detector
from .engines import Engines, OddEngine
from .factor_use import FactorUse
from .levels import Levels
from .medians import median_of, medians_of
from .phase_watch import PhaseWatch
from .suspicion import Suspicion

_WITH_PREFILL: Mask = np.arange(CELLS) >= PREFILL_CELL
_STALL = 0.9  # |log(y / yhat)|, a factor of 2.5


class Verdict(enum.Enum):
    """What a block said about speed."""

    NOTHING = 0
    ALARM = 1
    CONFIRMED = 2
    REFUTED = 3
    PREFILL = 4
    """Confirmed, for the steps with prefill alone."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What a block said about speed, new time per old time of the last alarm, and whether that is still on trial."""

    verdict: Verdict
    gain: float
    suspicious: bool


class DriftMonitor:
    """Cells, detectors, gate and trial of one target, by the coefficients of one of its models.

    Attributes:
        gain: new time per old time of the last alarm.
        engines: the levels of those that sent rows lately.
        suspicion: the alarm on trial, if there is one.
        alarms, confirmed, refuted: counts since the start.
        last: event time and gain of the last confirmed change; None before.
        of_prefill: whether it was of steps with prefill alone.
    """

    STATE = saved(
        "drift_monitor",
        cells=Cells,
        factor_use=FactorUse,
        detector=LikeFresh,
        levels=Levels,
        prefill=PhaseWatch,
        engines=Engines,
        waiting=list[Finite],
        recent=list[Finite],
        suspicion=MadeBy("new_suspicion"),
        row=Count,
        opened=Ints,
        gain=Finite,
        alarms=Count,
        confirmed=Count,
        refuted=Count,
        last=tuple[int, Finite] | None,
        of_prefill=bool,
    )

    def __init__(self, p: int, settings: DriftSettings) -> None:
        self.settings = settings
        self.cells = Cells(p)
        self.factor_use = FactorUse()
        self.detector = make_detector(settings)
        self.levels = Levels(settings)
        self.prefill = PhaseWatch(settings)
        self.engines = Engines()
        self.waiting: list[float] = []
        self.recent: list[float] = []
        self.suspicion: Suspicion | None = None
        self.row = 0
        self.opened = np.zeros(CELLS, np.int64)
        self.gain = 1.0
        self.alarms = self.confirmed = self.refuted = 0
        self.last: tuple[int, float] | None = None
        self.of_prefill = False

    def new_suspicion(self) -> Suspicion:
        """Nothing is known of it yet."""
        return Suspicion(self.settings)

    def learn(
        self, cell: Ints, x: Floats, steps: Floats, log_ratio: Floats, engine: Ints, fit: SpeedFit, end_ns: int
    ) -> Speed:
        """One block: x (n, p) of so many steps, log_ratio = log(y / x beta) (n,), and the fit that predicted."""
        cells, settings = self.cells, self.settings
        if self.suspicion is None:
            self.factor_use.score(log_ratio, cells.log_factors(fit.beta)[cell])
        groups = Groups.of(cell)
        ids, group = groups.ids, groups.of_rows()
        known = cells.rows[ids] >= settings.cell_rows_min
        all_known = bool(known.all())
        usual = reference = cells.usual(ids, fit.beta)
        spread = np.maximum(cells.spread[ids], settings.spread_min)
        own = spread * known
        if not all_known:
            # A shape never seen can only be compared with the fit, and counts as little as the fit is sure.
            reference = np.where(known, usual, 0.0)
            first = groups.order.take(groups.starts)
            strange = settings.stranger_spread * fit.scale * fit.stretch(x.take(first, axis=0))
            spread = np.where(known, spread, strange)
        e, spread = log_ratio - reference.take(group), spread.take(group)
        compared = known.take(group)
        if compared.any():
            self.engines.learn(engine[compared], cell[compared], (e + cells.log_y[cell])[compared], end_ns)
        unusual, by_form = cells.unusual_work(ids, group, x, fit.beta, settings.work_free)
        slack = settings.work_slack * unusual
        usual_spread, spread = spread, np.hypot(spread, slack)
        u = np.minimum(np.maximum(e / spread, -U_MAX), U_MAX)
        if self.suspicion is None:
            cells.follow(float(np.repeat(own, groups.sizes) @ u.take(groups.order)))
        if self.suspicion is None and all_known:
            rows = CellRows(x.take(groups.order, axis=0), e.take(groups.order), fit.beta)
            cells.learn(groups, usual, rows, settings)
        elif not all_known or self.suspicion is None:
            # On trial, references stay as they were: which speed these rows have is not decided yet.
            old = known.take(group)
            keep = (old & (self.suspicion is None)) | (~old & (np.abs(log_ratio) < _STALL))
            self._learn_references(cell[keep], x[keep], log_ratio[keep], fit.beta)
        self.row += len(cell)
        if self.suspicion is not None:
            self.prefill.reset()
            return self._speed(self._try_suspicion(self.suspicion, cell, e, u, spread))
        if settings.detector == NO_DETECTOR:
            return self.unchanged()
        by_form = np.where(steps == 1.0, settings.form_slack * by_form, np.inf)
        early = e / np.hypot(usual_spread, np.minimum(slack, by_form))
        verdict = self._watch_all(e, u, np.minimum(np.maximum(early, -U_MAX), U_MAX), spread, end_ns)
        if verdict is Verdict.NOTHING:
            verdict = self._watch_prefill((unusual == 0.0) & (cell >= PREFILL_CELL), e, u, end_ns)
        return self._speed(verdict)

    def _watch_prefill(self, rows: Mask, e: Floats, u: Floats, end_ns: int) -> Verdict:
        """Look for a change of the steps with prefill alone, in those of them whose work is usual."""
        gain = self.prefill.learn(e[rows], u[rows]) if rows.any() else 0.0
        if not gain or not self.engines.confirm(gain, self.cells.log_y, PREFILL_CELL):
            return Verdict.NOTHING
        self.gain = math.exp(gain)
        self.cells.shift(_WITH_PREFILL, gain)
        self.alarms += 1
        self.confirmed += 1
        self.last, self.of_prefill = (end_ns, self.gain), True
        return Verdict.PREFILL

    def _speed(self, verdict: Verdict) -> Speed:
        return Speed(verdict, self.gain, self.suspicion is not None)

    def unchanged(self) -> Speed:
        """What is said of rows that were not compared."""
        return self._speed(Verdict.NOTHING)

    def open_cells(self, cell: Ints, x: Floats, log_ratio: Floats, beta: Floats) -> None:
        """References from the rows of the first fit, without those that it left out."""
        self._learn_references(cell, x, log_ratio, beta)
        self.row += len(cell)

    def restarted(self) -> DriftMonitor:
        """A monitor that knows the same cells and has seen no change."""
        fresh = DriftMonitor(self.cells.x.shape[1], self.settings)
        fresh.cells, fresh.factor_use = self.cells, self.factor_use
        return fresh

    def _learn_references(self, cell: Ints, x: Floats, log_ratio: Floats, beta: Floats) -> None:
        """Learn references where some are new, from rows without the stalls, which must not become one; by cell."""
        if not len(cell):
            return
        order = stable_order(cell)
        cells, groups, x, log_ratio = self.cells, Groups.of(cell[order]), x[order], log_ratio[order]
        fresh = cells.rows[groups.ids] == 0.0
        if fresh.any():
            cells.open(groups, fresh, x, log_ratio, beta)
            self.opened[groups.ids[fresh]] = self.row
        usual = cells.usual(groups.ids, beta)
        cells.learn(groups, usual, CellRows(x, log_ratio - np.repeat(usual, groups.sizes), beta), self.settings)

    # ---------------------------------------------------------------- alarm and trial

    def _watch_all(self, e: Floats, u: Floats, early: Floats, spread: Floats, end_ns: int) -> Verdict:
        """Look for a change of all rows: what stands out of single rows, then what lasts."""
        settings, detector = self.settings, self.detector
        keep = settings.level_gain_rows
        self.recent = [*self.recent, *e[-keep:].tolist()][-keep:]
        values = np.concatenate([self.waiting, early])
        full = len(values) // detector.group * detector.group
        self.waiting = values[full:].tolist()
        lasting = self.levels.learn(u, spread)
        if detector.update(medians_of(values[:full], detector.group)):
            return self._open_suspicion(settings.gain_rows, end_ns)
        return self._open_suspicion(keep, end_ns) if lasting else Verdict.NOTHING

    def _open_suspicion(self, rows: int, end_ns: int) -> Verdict:
        """By the last so many rows."""
        gain = median_of(self.recent[-rows:])
        if abs(gain) < self.settings.gate:
            return Verdict.NOTHING
        suspicion = self.suspicion = self.new_suspicion()
        suspicion.gain, suspicion.usual, suspicion.usual_range = gain, self.levels.size, self.levels.usual_range
        suspicion.began(self.recent)
        self._reset_detectors()
        # Cells opened since the change began know no other speed.
        suspicion.old = (self.cells.rows > 0) & (self.opened < self.row - self.settings.onset_rows)
        suspicion.alarm_ns = end_ns
        self.gain = math.exp(gain)
        self.alarms += 1
        return Verdict.ALARM

    def _reset_detectors(self) -> None:
        self.detector.reset()
        self.levels.reset()
        self.waiting, self.recent = [], []

    def _try_suspicion(self, suspicion: Suspicion, cell: Ints, e: Floats, u: Floats, spread: Floats) -> Verdict:
        old = suspicion.old[cell] | (self.cells.rows[cell] < self.settings.cell_rows_min)
        suspicion.left -= len(e)
        suspicion.learn(e[old], u[old], spread[old])
        if not (suspicion.confirmed or suspicion.refuted):
            return Verdict.NOTHING
        self.suspicion = None
        gain = suspicion.measured_gain()
        confirmed = suspicion.confirmed and self.engines.confirm(gain, self.cells.log_y)
        if not confirmed or gain * suspicion.gain <= 0.0 or abs(gain) < self.settings.gate:
            self.refuted += 1
            return Verdict.REFUTED
        self.gain = math.exp(gain)
        self.cells.shift(suspicion.old, gain)
        self.confirmed += 1
        self.last, self.of_prefill = (suspicion.alarm_ns, self.gain), False
        return Verdict.CONFIRMED

    def log_factors(self, beta: Floats) -> Floats:
        """Log F of all cells as applied, (512,): a change of speed belongs to beta, also while it is only suspected."""
        return self.cells.log_factors(beta) if self.factor_use.applied else np.zeros(CELLS)

    def odd_engine(self) -> OddEngine | None:
        """The engine that differs most from the others of its configuration; None where fewer than two count."""
        return self.engines.odd(self.cells.log_y)

    def add(self, other: DriftMonitor) -> None:
        """Shapes of both; neither's alarms."""
        self.cells.add(other.cells, self.settings.cell_rows_max)
        self.factor_use.add(other.factor_use)

    def snapshot(self) -> DriftSnapshot:
        """The confirmed changes; a suspicion is not published."""
        last_ns, gain = (None, None) if self.last is None else self.last
        odd = self.odd_engine()
        return DriftSnapshot(
            last_unix_nano=last_ns,
            gain=gain,
            count=self.confirmed,
            of_prefill=self.of_prefill,
            engines_apart=None if odd is None else odd.ratio,
        )
