"""How much of an engine's telemetry arrived: steps heard of against steps that its page counted.

    ratio = (heard(t) - heard(t0)) / (counted(t) - counted(t0))       t: event time of the newest step heard of

Telemetry trails the page by seconds, so the page's count is taken back at t, between the two scrapes around it; a step
that several front ends count is one. Begins again after 4,096 steps, and when the counter falls. Steps of nothing but
unfinished prefill chunks are not counted by the page, so the ratio is cut at 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from collector.join.api_process import ApiProcess
from collector.join.engine import Engine
from online.state import saved

_SCRAPES_MAX = 256
_STEPS_MIN, _STEPS_MAX = 100.0, 4096.0


@dataclass(slots=True)
class Completeness:
    """Of one engine; ``ratio`` is None until a hundred steps were counted beside telemetry."""

    STATE = saved("completeness", fresh=lambda _: Completeness())

    ratio: float | None = None
    _counted: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_SCRAPES_MAX))
    _since: tuple[float, int] | None = None
    """Counted and heard at the begin."""

    def count(self, unix_ns: int, steps: float) -> None:
        """Add one scrape of the page to what it counted."""
        if self._counted and not (unix_ns > self._counted[-1][0] and steps >= self._counted[-1][1]):
            self._counted.clear()
            self._since = None
        self._counted.append((unix_ns, steps))

    def hear(self, emitters: Sequence[Engine | ApiProcess]) -> None:
        """Compare with what the emitters of steps have told so far."""
        engines = [emitter for emitter in emitters if isinstance(emitter, Engine)]
        heard = sum(engine.steps_heard for engine in engines)
        at_ns = max((engine.event_unix_ns for engine in engines), default=0)
        if not self._counted or not self._counted[0][0] <= at_ns <= self._counted[-1][0]:
            return
        times, counts = np.array(self._counted).T
        counted = float(np.interp(at_ns, times, counts))
        if self._since is None or heard < self._since[1]:
            self._since = (counted, heard)
        steps = counted - self._since[0]
        if steps >= _STEPS_MIN:
            self.ratio = min((heard - self._since[1]) / steps, 1.0)
        if steps >= _STEPS_MAX:
            self._since = (counted, heard)
