"""Did the machine change its speed, or only its mix of work? Compare like with like.

A linear form never fits a machine exactly, so a change of mix moves its residuals as a change of speed would. Each
cell c (batch shape: online/blocks.py) therefore has a reference of its own, and a row is compared with its own cell:

    e_i = (log y_i - Y_c) - (log x_i beta - log X_c beta)          Y_c: mean log y, X_c: mean x (p,) of the cell

beta enters only through the difference between the row's work and the cell's usual work, so that neither misfit of
the form nor learning of beta shows in e. Cells with fewer than 16 rows are not compared, only learned.

    u_i = clip(e_i / max(s_c, 0.5 %), -8, 8)        s_c: mean |e| of the cell x 1.2533
    m   = median of 16 consecutive u                outliers end here
    S+  = max(0, S+ + m - 1.5),  S- = max(0, S- - m - 1.5)         alarm when one exceeds 12
    g   = exp(median of the last 32 e)              gate: no alarm while |log g| < 6 %

An alarm is acted on at once by the learner (gain-corrected discount of its statistics) and reported only if confirmed:
the next 4 groups of 32 compared rows all lie on the same side of the old references, by half the gain and 3 %.

River's ADWIN and PageHinkley can take the place of the two-sided CUSUM; both run on medians of 32, because per row
they raise hundreds to thousands of false alarms per million. KSWIN is not offered: 60 us per row.
Reference: Page, Continuous inspection schemes (Biometrika 1954); Bifet and Gavalda, ADWIN (SDM 2007).
"""

from __future__ import annotations

import enum
import importlib
import math
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np

from online.blocks import CELLS, Groups
from online.rows import Floats, Ints
from online.snapshot import DriftSnapshot
from online.solve import Mask

_MEAN_ABS_TO_SD = 1.2533
_CLIP = 8.0
_NOISE_RATE, _NOISE_CLIP = 0.01, 3.0
_LEARN_CLIP = 4.0
_TINY = 1e-12
_STALL = 0.9  # |log(y / yhat)|, a factor of 2.5


class DriftSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Thresholds; every rate in rows or in units of the cell's own spread."""

    detector: str = "cusum"
    cell_rows_min: int = 16
    cell_rows_max: int = 256
    spread_min: float = 0.005
    group: int = 16
    slack: float = 1.5
    noise_share: float = 2.0
    limit: float = 12.0
    gate: float = 0.06
    gain_rows: int = 32
    onset_rows: int = 128
    stranger_spread: float = 2.0
    confirm_groups: int = 4
    confirm_rows: int = 32
    confirm_off: float = 0.03
    confirm_share: float = 0.5


class Detector(Protocol):
    """Medians in, alarm out."""

    group: int

    def update(self, value: float) -> bool:
        """One median of ``group`` normalised residuals; True = alarm."""

    def reset(self) -> None:
        """Start over, after an alarm."""


class Cusum:
    """Two-sided cumulative sum with slack."""

    def __init__(self, settings: DriftSettings) -> None:
        self.group = settings.group
        self.slack, self.limit = settings.slack, settings.limit
        self.noise_share = settings.noise_share
        self.noise = 0.0
        self.up = self.down = 0.0

    def update(self, value: float) -> bool:
        """See the module's equations."""
        calm = max(1.0, self.noise_share * self.noise)
        self.up = max(0.0, self.up + value - calm * self.slack)
        self.down = max(0.0, self.down - value - calm * self.slack)
        self.noise += _NOISE_RATE * (min(abs(value), _NOISE_CLIP) - self.noise)
        return max(self.up, self.down) > calm * self.limit

    def reset(self) -> None:
        """Both sums to zero."""
        self.up = self.down = 0.0


class RiverDetector:
    """ADWIN (delta 1e-3) or PageHinkley (delta 0.5, threshold 20) on medians of 32."""

    group = 32

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.model = self._make()

    def _make(self) -> Any:
        drift = importlib.import_module("river.drift")
        if self.kind == "adwin":
            return drift.ADWIN(delta=1e-3)
        return drift.PageHinkley(delta=0.5, threshold=20.0, mode="both")

    def update(self, value: float) -> bool:
        """One median."""
        self.model.update(value)
        return bool(self.model.drift_detected)

    def reset(self) -> None:
        """A fresh detector."""
        self.model = self._make()


class Never:
    """No detection."""

    group = 32

    def update(self, value: float) -> bool:
        """Never an alarm."""
        del value
        return False

    def reset(self) -> None:
        """Nothing to do."""


DETECTORS = ("cusum", "adwin", "page_hinkley", "none")


def make_detector(settings: DriftSettings) -> Detector:
    """The configured detector.

    Raises:
        ValueError: for an unknown name.
    """
    if settings.detector == "cusum":
        return Cusum(settings)
    if settings.detector in ("adwin", "page_hinkley"):
        return RiverDetector(settings.detector)
    if settings.detector == "none":
        return Never()
    raise ValueError(f"detector: {settings.detector!r} is not one of {', '.join(DETECTORS)}")


class Cells:
    """References of all cells: rows (512,), mean log y (512,), spread (512,), mean x (512, p)."""

    __slots__ = ("log_y", "rows", "spread", "x")

    def __init__(self, p: int) -> None:
        self.rows = np.zeros(CELLS)
        self.log_y = np.zeros(CELLS)
        self.spread = np.zeros(CELLS)
        self.x = np.zeros((CELLS, p))

    def open(self, groups: Groups, fresh: Mask, x: Floats, log_ratio: Floats, beta: Floats) -> None:
        """First references of cells never seen: the median of their first rows, in the order of the groups."""
        for k in np.flatnonzero(fresh):
            rows = slice(groups.starts[k], groups.starts[k] + groups.sizes[k])
            c = groups.ids[k]
            self.x[c] = x[rows].mean(axis=0)
            self.log_y[c] = float(np.median(log_ratio[rows])) + math.log(max(float(self.x[c] @ beta), _TINY))

    def usual(self, ids: Ints, beta: Floats) -> Floats:
        """Y_c - log X_c beta of cells, (g,)."""
        predicted: Floats = self.x[ids] @ beta
        return self.log_y[ids] - np.log(np.maximum(predicted, _TINY))

    def learn(self, groups: Groups, usual: Floats, rows: Rows, settings: DriftSettings) -> None:
        """Move the references of the visited cells toward these rows, which are in the order of the groups."""
        ids, starts, count = groups.ids, groups.starts, groups.sizes
        before, beta = self.rows[ids], rows.beta
        opening = before < settings.cell_rows_min
        limit = np.where(opening, np.inf, _LEARN_CLIP * np.maximum(self.spread[ids], settings.spread_min))
        each = np.repeat(limit, count)
        bounded = np.minimum(np.maximum(rows.e, -each), each)
        rate = count / (np.minimum(before, settings.cell_rows_max) + count)
        usual = usual + rate * (np.add.reduceat(bounded, starts) / count)
        self.x[ids] += rate[:, None] * (np.add.reduceat(rows.x, starts, axis=0) / count[:, None] - self.x[ids])
        self.log_y[ids] = usual + np.log(np.maximum(self.x[ids] @ beta, _TINY))
        seen = _MEAN_ABS_TO_SD * np.add.reduceat(np.abs(bounded), starts) / count
        self.spread[ids] += rate * (seen - self.spread[ids])
        self.rows[ids] = before + count


@dataclass(slots=True)
class Fit:
    """beta (p,) and the robust scale of its relative residuals."""

    beta: Floats
    scale: float


@dataclass(slots=True)
class Rows:
    """What a block says to the cells: x (n, p), e (n,) against their references, and the beta that predicted."""

    x: Floats
    e: Floats
    beta: Floats


class Verdict(enum.Enum):
    """What a block said about speed."""

    NOTHING = 0
    ALARM = 1
    CONFIRMED = 2
    REFUTED = 3


class DriftMonitor:
    """Cells, detector, gate and confirmation of one model.

    Attributes:
        gain: new time per old time of the last alarm.
        alarms, confirmed, refuted: counts since the start.
        last_ns: event time of the last confirmed change; None before.
    """

    def __init__(self, p: int, settings: DriftSettings) -> None:
        self.settings = settings
        self.cells = Cells(p)
        self.detector = make_detector(settings)
        self.waiting: list[float] = []
        self.recent = np.zeros(0)
        self.since: list[float] | None = None
        self.groups = 0
        self.row = 0
        self.opened = np.zeros(CELLS, np.int64)
        self.shifted: Mask = np.zeros(CELLS, np.bool_)
        self.gain = 1.0
        self.alarm_ns = 0
        self.alarms = self.confirmed = self.refuted = 0
        self.last_ns: int | None = None
        self.last_gain: float | None = None

    def learn(self, cell: Ints, x: Floats, log_ratio: Floats, fit: Fit, end_ns: int) -> Verdict:
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
            reference = np.where(known, usual, math.log(self.gain) if self.since is not None else 0.0)
            spread = np.where(known, spread, settings.stranger_spread * fit.scale)
        e = log_ratio - np.repeat(reference, sizes)
        u = np.minimum(np.maximum(e / np.repeat(spread, sizes), -_CLIP), _CLIP)
        if all_known:
            cells.learn(groups, usual, Rows(x, e, fit.beta), settings)
        else:
            self._meet(cell, groups, known, x, log_ratio, fit)
        self.row += len(cell)
        # Back in the order of time.
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return self._judge(e[back], u[back], end_ns)

    def _meet(self, cell: Ints, groups: Groups, known: Mask, x: Floats, log_ratio: Floats, fit: Fit) -> None:
        """Learn references where some are new; a stall must not become the reference of a new cell."""
        cells, beta = self.cells, fit.beta
        keep = np.repeat(known, groups.sizes) | (np.abs(log_ratio) < _STALL)
        if not keep.any():
            return
        x, log_ratio, groups = x[keep], log_ratio[keep], Groups.of(cell[groups.order][keep])
        fresh = cells.rows[groups.ids] == 0.0
        if fresh.any():
            cells.open(groups, fresh, x, log_ratio, beta)
            self.opened[groups.ids[fresh]] = self.row
        usual = cells.usual(groups.ids, beta)
        cells.learn(groups, usual, Rows(x, log_ratio - np.repeat(usual, groups.sizes), beta), self.settings)

    def _judge(self, compared: Floats, u: Floats, end_ns: int) -> Verdict:
        self.recent = np.concatenate([self.recent, compared])[-self.settings.gain_rows :]
        alarm = self._detect(u)
        if self.since is not None:
            self.since.extend((compared + math.log(self.gain)).tolist())
            verdict = self._confirm()
            if verdict is not Verdict.NOTHING:
                return verdict
        return self._raise(end_ns) if alarm else Verdict.NOTHING

    def _detect(self, u: Floats) -> bool:
        size = self.detector.group
        values = np.concatenate([self.waiting, u])
        full = len(values) // size
        medians = np.sort(values[: full * size].reshape(full, size), axis=1)[:, size // 2]
        self.waiting = values[full * size :].tolist()
        alarm = False
        for value in medians.tolist():
            alarm = self.detector.update(value) or alarm
        return alarm

    def _raise(self, end_ns: int) -> Verdict:
        gain = float(np.median(self.recent[-self.settings.gain_rows // 2 :]))
        if abs(gain) < self.settings.gate:
            return Verdict.NOTHING
        self.detector.reset()
        self.waiting = []
        self.recent = self.recent[:0]
        # An alarm while one is open is about the same change: its gain is relative to the first references.
        self.gain = math.exp(gain)
        # Cells opened since the change began know no other speed.
        self.shifted = (self.cells.rows > 0) & (self.opened < self.row - self.settings.onset_rows)
        self.cells.log_y += gain * self.shifted
        self.since, self.groups = [], 0
        self.alarm_ns = end_ns
        self.alarms += 1
        return Verdict.ALARM

    def _confirm(self) -> Verdict:
        """After each full group: refuted by the first that is not off, confirmed by the last."""
        settings = self.settings
        assert self.since is not None  # noqa: S101  the caller looked
        size = settings.confirm_rows
        least = max(settings.confirm_off, settings.confirm_share * abs(math.log(self.gain)))
        sign = math.copysign(1.0, self.gain - 1.0)
        while len(self.since) >= size:
            group, self.since = self.since[:size], self.since[size:]
            if sign * float(np.median(group)) <= least:
                self.since = None
                self.refuted += 1
                self.cells.log_y -= math.log(self.gain) * self.shifted
                self.detector.reset()
                return Verdict.REFUTED
            self.groups += 1
            if self.groups >= settings.confirm_groups:
                self.since = None
                self.confirmed += 1
                self.last_ns, self.last_gain = self.alarm_ns, self.gain
                return Verdict.CONFIRMED
        return Verdict.NOTHING

    def snapshot(self) -> DriftSnapshot:
        """Confirmed changes only."""
        return DriftSnapshot(last_unix_nano=self.last_ns, gain=self.last_gain, count=self.confirmed)
