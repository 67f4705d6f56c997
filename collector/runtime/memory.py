"""Too much memory: exports are refused, retryably, while the process holds more than it may.

The real bounds are structural (queue bytes, join window, configurations); this one is for what they did not foresee.
The limit is the configured one, or 80 % of the cgroup's: beyond that the kernel would end the process and with it the
unsaved state. Collecting garbage rarely gives memory back in CPython, refusing does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from .clock import Clock

CHECK_EVERY_NS = 250_000_000
CGROUP_SHARE = 0.8
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_UNLIMITED_BYTES = 1 << 60


class MemoryGuard:
    """Called by the receivers' threads; reads the size at most four times a second."""

    def __init__(self, limit_bytes: int | None, read_bytes: Callable[[], int], clock: Clock) -> None:
        self.limit_bytes = limit_bytes
        self._read_bytes = read_bytes
        self._clock = clock
        self._lock = threading.Lock()
        """Guards what was read last, and when."""
        self._checked_ns: int | None = None
        self._short = False

    def is_short(self) -> bool:
        """Whether more than the limit is in use."""
        if self.limit_bytes is None:
            return False
        with self._lock:
            now_ns = self._clock.monotonic_ns()
            if self._checked_ns is None or now_ns - self._checked_ns >= CHECK_EVERY_NS:
                self._checked_ns = now_ns
                self._short = self._read_bytes() > self.limit_bytes
            return self._short

    def look(self) -> bool:
        """As :meth:`is_short`, at this moment."""
        with self._lock:
            self._checked_ns = None
        return self.is_short()


def resident_bytes() -> int:
    """Resident memory of this process."""
    with Path("/proc/self/statm").open("rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cgroup_limit_bytes(files: tuple[Path, ...] = _CGROUP_LIMITS) -> int | None:
    """What the container may use, None without a limit."""
    for path in files:
        try:
            text = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdigit() and int(text) < _UNLIMITED_BYTES:
            return int(text)
    return None


def limit_bytes(limit_mib: int, cgroup_bytes: int | None) -> int | None:
    """The configured limit, else a share of the cgroup's, else none."""
    if limit_mib:
        return limit_mib << 20
    return None if cgroup_bytes is None else int(cgroup_bytes * CGROUP_SHARE)
