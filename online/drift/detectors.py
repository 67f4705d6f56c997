"""Change detectors: normalised medians in, alarm out. What the medians are: online/drift/monitor.py.

``cusum``, the default, is two-sided with a slack and a limit that do not depend on how well the form fits: what the
medians are relative to, the usual time of the same batch shape, does not either.

    S+  = max(0, S+ + m - 1.75),  S- = max(0, S- - m - 1.75)      alarm: max(S+, S-) > 14

``adwin`` (delta 1e-3) and ``page_hinkley`` are River's, on medians of 32, because per row they raise hundreds to
thousands of false alarms per million; their state is not saved, they start over with the process. KSWIN is not
offered: 60 us per row. Reference: Page (Biometrika 1954); Bifet and Gavalda, ADWIN (SDM 2007).
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol, Self

import msgspec

from online.state import Finite, saved

U_MAX = 8.0
"""Limit of u: further off says no more."""


class DriftSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Thresholds; every rate in rows or in units of the cell's own spread. Copies share it."""

    detector: str = "cusum"
    cell_rows_min: int = 16
    cell_rows_max: int = 256
    spread_min: float = 0.005
    group: int = 8
    slack: float = 1.75
    limit: float = 14.0
    level_slack: float = 1.0
    level_limit: float = 6.0
    level_min: float = 0.25
    gate: float = 0.06
    gain_rows: int = 16
    level_gain_rows: int = 64
    onset_rows: int = 128
    stranger_spread: float = 2.0
    work_free: float = 0.35
    work_slack: float = 0.7
    form_slack: float = 0.2
    trial_evidence: float = 9.0
    trial_fall: float = 3.0
    trial_levels_min: int = 2
    trial_rows_min: int = 136
    trial_rows_max: int = 352
    phase_share: float = 0.5

    def __deepcopy__(self, _memo: object) -> Self:
        return self


class Detector(Protocol):
    """Medians in, alarm out."""

    group: int

    def update(self, medians: list[float]) -> bool:
        """Medians of ``group`` normalised residuals each, in order; True = alarm."""

    def reset(self) -> None:
        """Start over, after an alarm."""


class Cusum:
    """Two-sided cumulative sum with slack."""

    STATE = saved("cusum", up=Finite, down=Finite)

    def __init__(self, group: int, slack: float, limit: float) -> None:
        self.group = group
        self.slack, self.limit = slack, limit
        self.up = self.down = 0.0

    def update(self, medians: list[float]) -> bool:
        """See the module's equations."""
        up, down, slack, limit, alarm = self.up, self.down, self.slack, self.limit, False
        for value in medians:
            up, down = up + value - slack, down - value - slack
            if not up > 0.0:
                up = 0.0
            if not down > 0.0:
                down = 0.0
            alarm = alarm or up > limit or down > limit
        self.up, self.down = up, down
        return alarm

    def reset(self) -> None:
        """Both sums to zero."""
        self.up = self.down = 0.0


class _Stateless:
    """Starts over with the process."""

    STATE = saved("stateless_detector")


class RiverDetector(_Stateless):
    """ADWIN (delta 1e-3) or PageHinkley (delta 0.5, threshold 20) on medians of 32."""

    group = 32

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.model = self._fresh_model()

    def _fresh_model(self) -> Any:
        drift = importlib.import_module("river.drift")
        if self.kind == "adwin":
            return drift.ADWIN(delta=1e-3)
        return drift.PageHinkley(delta=0.5, threshold=20.0, mode="both")

    def update(self, medians: list[float]) -> bool:
        """Alarm if any of them is one."""
        alarm = False
        for value in medians:
            self.model.update(value)
            alarm = alarm or bool(self.model.drift_detected)
        return alarm

    def reset(self) -> None:
        """A fresh detector."""
        self.model = self._fresh_model()


class Never(_Stateless):
    """A detector that never detects, for a configured ``none``."""

    group = 32

    def update(self, medians: list[float]) -> bool:
        """Never an alarm."""
        del medians
        return False

    def reset(self) -> None:
        """Nothing to do."""


NO_DETECTOR = "none"
DETECTORS = ("cusum", "adwin", "page_hinkley", NO_DETECTOR)


def make_detector(settings: DriftSettings) -> Detector:
    """The configured detector.

    Raises:
        ValueError: for an unknown name.
    """
    if settings.detector == "cusum":
        return Cusum(settings.group, settings.slack, settings.limit)
    if settings.detector in ("adwin", "page_hinkley"):
        return RiverDetector(settings.detector)
    if settings.detector == NO_DETECTOR:
        return Never()
    raise ValueError(f"detector: {settings.detector!r} is not one of {', '.join(DETECTORS)}")
