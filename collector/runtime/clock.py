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
