"""Did the machine change its speed, or only its mix of work? Compare like with like.

A linear form never fits a machine exactly, so a change of mix moves its residuals as a change of speed would. Each
cell c (batch shape: online/blocks.py) therefore has a reference of its own, and a row is compared with its own cell:

    e_i = (log y_i - Y_c) - (log x_i beta - log X_c beta)          Y_c: mean log y, X_c: mean x (p,) of the cell

beta enters only through the difference between the row's work and the cell's usual work, so that neither misfit of
the form nor learning of beta shows in e. A cell with fewer than 16 rows has no
reference yet: there the row is compared with the fit, and counts less: u_i = e_i over twice the fit's scale, times
how far outside of what it has seen the fit is asked (sqrt of the leverage in units of its mean).

    u_i = clip(e_i / max(s_c, 0.5 %), -8, 8)        s_c: mean |e| of the cell x 1.2533
    m   = median of 8 consecutive u                outliers end here
    S+, S-  two-sided CUSUM of m                    alarm when one exceeds its limit (online/drift/detectors.py)
    g   = exp(median of the last 16 e)              gate: no alarm while |log g| < 6 %

An alarm is a suspicion: the learner predicts by it at once, and learns on the side. It is confirmed, acted on and
reported if the next 4 groups of 32 rows all lie on the same side of the old references, by half the gain and 3 %; the
first group that does not refutes it, and the references go back.

The detector on the medians is chosen by name: online/drift/detectors.py. Reference: Page (Biometrika 1954).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np

from online.blocks import CELLS, PREFILL_CELL, Groups
from online.rows import Floats, Ints, Mask
from online.snapshot import DriftSnapshot
from online.state import Count, Finite, LikeFresh, saved

from .cells import CellRows, Cells, SpeedFit
from .detectors import DriftSettings, make_detector
from .phase_watch import PhaseWatch

_CLIP = 8.0
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
    """Cells, detector, gate and confirmation of one target, by the coefficients of one of its models.

    Attributes:
        gain: new time per old time of the last alarm.
        alarms, confirmed, refuted: counts since the start.
        last: event time and gain of the last confirmed change; None before.
    """

    STATE = saved(
        "drift_monitor",
        cells=Cells,
        detector=LikeFresh,
        prefill=PhaseWatch,
        waiting=list[Finite],
        recent=list[Finite],
        since=list[Finite],
        suspicious=bool,
        groups=Count,
        row=Count,
        opened=Ints,
        shifted=Mask,
        gain=Finite,
        alarm_ns=int,
        alarms=Count,
        confirmed=Count,
        refuted=Count,
        last=tuple[int, Finite] | None,
    )

    def __init__(self, p: int, settings: DriftSettings) -> None:
        self.settings = settings
        self.cells = Cells(p)
        self.detector = make_detector(settings)
        self.prefill = PhaseWatch(settings)
        self.waiting: list[float] = []
        self.recent: list[float] = []
        self.since: list[float] = []
        self.suspicious = False
        self.groups = 0
        self.row = 0
        self.opened = np.zeros(CELLS, np.int64)
        self.shifted: Mask = np.zeros(CELLS, np.bool_)
        self.gain = 1.0
        self.alarm_ns = 0
        self.alarms = self.confirmed = self.refuted = 0
        self.last: tuple[int, float] | None = None

    def learn(self, cell: Ints, x: Floats, log_ratio: Floats, fit: SpeedFit, end_ns: int) -> Speed:
        """One block: x (n, p), log_ratio = log(y / x beta) (n,), and the fit that predicted."""
        cells, settings = self.cells, self.settings
        groups = Groups.of(cell)
        order, sizes = groups.order, groups.sizes
        known = cells.rows[groups.ids] >= settings.cell_rows_min
        all_known = bool(known.all())
        x, log_ratio = x[order], log_ratio[order]
        usual = cells.usual(groups.ids, fit.beta)
        spread = np.maximum(cells.spread[groups.ids], settings.spread_min)
        if all_known:
            reference = usual
        else:
            # A shape never seen can only be compared with the fit, and counts as little as the fit is sure.
            reference = np.where(known, usual, math.log(self.gain) if self.suspicious else 0.0)
            strange = settings.stranger_spread * fit.scale * fit.stretch(x[groups.starts])
            spread = np.where(known, spread, strange)
        e = log_ratio - np.repeat(reference, sizes)
        spread = np.hypot(np.repeat(spread, sizes), settings.work_slack * cells.unusual_work(groups, x, fit.beta))
        u = np.minimum(np.maximum(e / spread, -_CLIP), _CLIP)
        if all_known:
            cells.learn(groups, usual, CellRows(x, e, fit.beta), settings)
        else:
            keep = np.repeat(known, sizes) | (np.abs(log_ratio) < _STALL)
            self._learn_references(cell[order][keep], x[keep], log_ratio[keep], fit.beta)
        self.row += len(cell)
        # Back in the order of time.
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        e, u = e[back], u[back]
        verdict = self._decide(e, u, end_ns)
        if verdict is Verdict.NOTHING and not self.suspicious:
            verdict = self._watch_prefill(cell, e, u, end_ns)
        else:
            self.prefill.reset()
        return Speed(verdict, self.gain, self.suspicious)

    def _watch_prefill(self, cell: Ints, e: Floats, u: Floats, end_ns: int) -> Verdict:
        """Look for a change of the steps with prefill alone."""
        rows = cell >= PREFILL_CELL
        gain = self.prefill.learn(e[rows], u[rows]) if rows.any() else 0.0
        if not gain:
            return Verdict.NOTHING
        self.gain = math.exp(gain)
        self.cells.log_y[PREFILL_CELL:] += gain * (self.cells.rows[PREFILL_CELL:] > 0.0)
        self.alarms += 1
        self.confirmed += 1
        self.last = (end_ns, self.gain)
        return Verdict.PREFILL

    def unchanged(self) -> Speed:
        """What is said of rows that were not compared."""
        return Speed(Verdict.NOTHING, self.gain, self.suspicious)

    def log_factors(self, beta: Floats) -> Floats:
        """Log F of all cells, (512,): a change of speed belongs to beta, also while it is only suspected."""
        if not self.suspicious:
            return self.cells.log_factors(beta)
        return self.cells.log_factors(beta) - math.log(self.gain) * self.shifted

    def open_cells(self, cell: Ints, x: Floats, log_ratio: Floats, beta: Floats) -> None:
        """References from the rows of the first fit, without those that it left out."""
        self._learn_references(cell, x, log_ratio, beta)
        self.row += len(cell)

    def restarted(self) -> DriftMonitor:
        """A monitor that knows the same cells and has seen no change."""
        fresh = DriftMonitor(self.cells.x.shape[1], self.settings)
        fresh.cells = self.cells
        return fresh

    def _learn_references(self, cell: Ints, x: Floats, log_ratio: Floats, beta: Floats) -> None:
        """Learn references where some are new, from rows without the stalls, which must not become one; by cell."""
        if not len(cell):
            return
        order = cell.argsort(kind="stable")
        cells, groups, x, log_ratio = self.cells, Groups.of(cell[order]), x[order], log_ratio[order]
        fresh = cells.rows[groups.ids] == 0.0
        if fresh.any():
            cells.open(groups, fresh, x, log_ratio, beta)
            self.opened[groups.ids[fresh]] = self.row
        usual = cells.usual(groups.ids, beta)
        cells.learn(groups, usual, CellRows(x, log_ratio - np.repeat(usual, groups.sizes), beta), self.settings)

    def _decide(self, compared: Floats, u: Floats, end_ns: int) -> Verdict:
        keep = self.settings.gain_rows
        self.recent = [*self.recent, *compared[-keep:].tolist()][-keep:]
        alarm = self._detect_shift(u)
        if self.suspicious:
            self.since.extend((compared + math.log(self.gain)).tolist())
            verdict = self._test_alarm()
            if verdict is not Verdict.NOTHING:
                return verdict
        return self._open_alarm(end_ns) if alarm else Verdict.NOTHING

    def _detect_shift(self, u: Floats) -> bool:
        size = self.detector.group
        values = np.concatenate([self.waiting, u])
        full = len(values) // size
        medians = np.sort(values[: full * size].reshape(full, size), axis=1)[:, size // 2]
        self.waiting = values[full * size :].tolist()
        return self.detector.update(medians.tolist())

    def _open_alarm(self, end_ns: int) -> Verdict:
        gain = float(np.median(self.recent))
        if abs(gain) < self.settings.gate:
            return Verdict.NOTHING
        self.detector.reset()
        self.waiting = []
        self.recent = []
        # An alarm while one is open is about the same change: its gain is relative to the first references.
        self.gain = math.exp(gain)
        # Cells opened since the change began know no other speed.
        self.shifted = (self.cells.rows > 0) & (self.opened < self.row - self.settings.onset_rows)
        self.cells.log_y += gain * self.shifted
        self.since, self.groups, self.suspicious = [], 0, True
        self.alarm_ns = end_ns
        self.alarms += 1
        return Verdict.ALARM

    def _test_alarm(self) -> Verdict:
        """After each full group: refuted by the first that is not off, confirmed by the last."""
        settings, gain = self.settings, abs(math.log(self.gain))
        size = settings.confirm_rows
        groups = min(len(self.since) // size, settings.confirm_groups)
        if groups == self.groups:
            return Verdict.NOTHING
        self.groups = groups
        off = math.copysign(1.0, self.gain - 1.0) * np.asarray(self.since[: groups * size])
        least = float(np.median(off.reshape(groups, size), axis=1).min())
        complete = groups == settings.confirm_groups
        refuted = least <= max(settings.confirm_off, settings.confirm_share * gain)
        if not (refuted or complete):
            return Verdict.NOTHING
        self.since, self.suspicious = [], False
        if not refuted:
            self.confirmed += 1
            self.last = (self.alarm_ns, self.gain)
            return Verdict.CONFIRMED
        self.refuted += 1
        self.cells.log_y -= math.log(self.gain) * self.shifted
        self.detector.reset()
        return Verdict.REFUTED

    def snapshot(self) -> DriftSnapshot:
        """The confirmed changes; a suspicion is not published."""
        last_ns, gain = (None, None) if self.last is None else self.last
        return DriftSnapshot(last_unix_nano=last_ns, gain=gain, count=self.confirmed)
