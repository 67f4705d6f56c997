"""How often a server is scraped: so that a window holds enough steps and the page costs it next to nothing.

    interval = clip(10 T, interval_min, interval_max), T: seconds per step of late       a window of 5 to 30 steps
    interval >= cost / 2 %                               cost: time that the page took of late, an upper limit
    after k failures in a row: interval 2^k, 30 s at most

Both means forget within some ten pages. An idle server is asked every ``interval_max``.
"""

from __future__ import annotations

from dataclasses import dataclass

STEPS_WANTED = 10.0
COST_SHARE = 0.02
INTERVAL_MAX_S = 15.0
BACKOFF_MAX_S = 30.0
_RATE = 0.2
_BACKOFF_DOUBLINGS_MAX = 8


@dataclass(slots=True)
class Cadence:
    """Of one server, in seconds."""

    interval_min_s: float
    interval_max_s: float
    step_s: float | None = None
    cost_s: float = 0.0
    failures: int = 0

    def answered(self, elapsed_s: float, steps: float, cost_s: float) -> None:
        """A page came: ``steps`` were counted in ``elapsed_s`` since the last one."""
        self.failures = 0
        self.cost_s += (cost_s - self.cost_s) * (_RATE if self.cost_s else 1.0)
        if steps >= 1.0 and elapsed_s > 0.0:
            step_s = elapsed_s / steps
            self.step_s = step_s if self.step_s is None else self.step_s + _RATE * (step_s - self.step_s)
        elif elapsed_s > 0.0:
            self.step_s = None

    def failed(self) -> None:
        """Note that no page came, so that the next try waits longer."""
        self.failures += 1

    @property
    def interval_s(self) -> float:
        """Until the next question."""
        wanted = self.interval_max_s if self.step_s is None else STEPS_WANTED * self.step_s
        interval = min(max(wanted, self.interval_min_s), self.interval_max_s)
        interval = max(interval, min(self.cost_s / COST_SHARE, INTERVAL_MAX_S))
        doublings = min(self.failures, _BACKOFF_DOUBLINGS_MAX)
        return max(interval, min(self.interval_max_s * 2.0**doublings, BACKOFF_MAX_S)) if doublings else interval
