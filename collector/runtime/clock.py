"""Clocks come in as arguments: a test passes its own, and nothing else here reads the time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What the process may know about time."""

    def monotonic_ns(self) -> int:
        """Nanoseconds that never run backwards; for waiting and deadlines."""
        ...

    def unix_nano(self) -> int:
        """Wall clock in nanoseconds since the epoch; for stamps that people read."""
        ...


class SystemClock:
    """The clocks of this machine."""

    def monotonic_ns(self) -> int:
        """Nanoseconds of CLOCK_MONOTONIC."""
        return time.monotonic_ns()

    def unix_nano(self) -> int:
        """Nanoseconds of CLOCK_REALTIME."""
        return time.time_ns()


class SteadyClock:
    """The wall clock, except that it never goes back: when it is set back, nobody else's clock seems to be ahead."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ns = clock.unix_nano() - clock.monotonic_ns()

    def unix_nano(self) -> int:
        """Wall clock in nanoseconds since the epoch; from any thread."""
        monotonic_ns = self._clock.monotonic_ns()
        self._offset_ns = max(self._offset_ns, self._clock.unix_nano() - monotonic_ns)
        return monotonic_ns + self._offset_ns
