"""Too much memory: exports are refused, retryably, while the process holds more than it may.

The real bounds are structural (queue bytes, join window, configurations); this one is for what they did not foresee.
The limit is the configured one, or 80 % of the cgroup's: beyond that the kernel would end the process and with it the
unsaved state. Collecting garbage rarely gives memory back in CPython, refusing does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from .clock import Clock

CHECK_EVERY_NS = 250_000_000
CGROUP_SHARE = 0.8
LARGE_BLOCK_BYTES = 4 << 20
KEPT_BYTES = 32 << 20
_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
_M_ARENA_MAX = -8
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


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """For imports: they make much and leave no garbage, and looking for it is a tenth of a start.

    What was made is never looked through again, however long the process runs.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def tune_malloc() -> None:
    """Have blocks of a few MiB and more go back to the system when freed, and smaller ones stay.

    glibc raises the first threshold to the largest block ever freed; after one export of 24 MB the next ones would be
    cut from the heap and stay there. Setting it fixes the second one at 128 KiB, so that numpy's temporaries are given
    back and faulted in again with every batch: 0.3 us a step in the bulk profile.

    One arena for all threads, set before there are any: else each keeps as much, out of reach of :func:`give_back` (the
    free end of an arena that is not the main one). The soak holds 164 MiB instead of 188 and needs no more CPU: most
    threads here hold the interpreter's lock and do not meet at another one.
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        libc.mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    """Return what is free to the system; a millisecond or two, without the interpreter's lock.

    What a large export left in the transport's buffers would otherwise stay there. And glibc keeps pages that lie free
    between blocks in use: without any leak, a day of load left 8 to 16 MiB more in the process than an hour of it.
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


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
