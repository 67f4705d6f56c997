"""Time in tests: a clock that is moved by hand, and waiting for another thread or process."""

from __future__ import annotations

import threading
import time

T0_NS = 1_795_000_000_000_000_000


class FakeClock:
    """Time passes when told to."""

    def __init__(self, unix_nano: int = T0_NS):
        self._monotonic_ns = 1_000_000_000
        self._unix_nano = unix_nano

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def unix_nano(self) -> int:
        return self._unix_nano

    def advance(self, seconds: float) -> None:
        self._monotonic_ns += int(seconds * 1e9)
        self._unix_nano += int(seconds * 1e9)

    def set_back(self, seconds: float) -> None:
        """By whoever keeps the wall clock; time that passes is not touched."""
        self._unix_nano -= int(seconds * 1e9)


def eventually(condition):
    """What it says once another thread or process got there; the limit is one that only a defect reaches."""
    pause, give_up_s = threading.Event(), time.monotonic() + 100.0
    while not (found := condition()):
        assert time.monotonic() < give_up_s, "never came true"
        pause.wait(0.02)
    return found
