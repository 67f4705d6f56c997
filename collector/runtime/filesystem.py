"""How the process ends, the system calls of the log, and how much memory the process may hold.

    ConfigError    exit 78: a key that does not exist, or a value it cannot take
    StartError     exit 1: the machine refuses (a port in use, a directory that cannot be written)

While the process holds more memory than it may, exports are refused, retryably. The real bounds are structural (queue
bytes, join window, configurations); this one is for what they did not foresee. The limit is the configured one, or 80 %
of the cgroup's: beyond that the kernel would end the process and with it the unsaved state. Collecting garbage rarely
gives memory back in CPython, refusing does.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from collector.config import ENV_PREFIX, Endpoint

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CONFIG = 78
"""EX_CONFIG of sysexits.h."""
EXIT_INTERRUPTED = 130
"""Ctrl-C, as shells have it."""


class StartError(Exception):
    """The configuration is fine, the environment is not; the text is one clear sentence."""


def cannot_listen(endpoint: Endpoint, purpose: str, key: str, reason: str) -> StartError:
    """StartError of a server that does not get its port, which a key of the configuration sets."""
    return StartError(f"cannot listen on {endpoint} for {purpose}: {reason}; set {ENV_PREFIX}{key.upper()}=HOST:PORT")


def sentence(error: Exception) -> str:
    """What went wrong, in the words of the system where it has any, on one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return " ".join(text.split()) or type(error).__name__


class SystemFiles:
    """System calls that may fail or be slow; tests replace them."""

    def open(self, path: Path) -> int:
        """Create a file for appending."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, descriptor: int, data: bytes) -> int:
        """Write bytes to a descriptor; returns how many."""
        return os.write(descriptor, data)

    def write_all(self, descriptor: int, data: bytes) -> None:
        """Write in as many calls as it takes; of an OSError a part may be there."""
        written = 0
        while written < len(data):
            more = self.write(descriptor, data[written:])
            if not more:
                raise OSError(0, "nothing was written")
            written += more

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        """Like ftruncate(2)."""
        os.ftruncate(descriptor, size_bytes)

    volume = staticmethod(shutil.disk_usage)


CGROUP_SHARE = 0.8
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_UNLIMITED_BYTES = 1 << 60


class MemoryGuard(NamedTuple):
    """Tells whether the process uses too much memory; a check before each export costs 14 us."""

    limit_bytes: int | None
    read_bytes: Callable[[], int]

    def is_short(self) -> bool:
        """Whether more than the limit is in use."""
        return self.limit_bytes is not None and self.read_bytes() > self.limit_bytes


def resident_bytes() -> int:
    """Resident memory of this process."""
    with Path("/proc/self/statm").open("rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def limit_bytes(limit_mib: int, cgroup_files: tuple[Path, ...] = _CGROUP_LIMITS) -> int | None:
    """The configured limit, else a share of what the container may use, else none."""
    if limit_mib:
        return limit_mib << 20
    for path in cgroup_files:
        try:
            text = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdigit() and int(text) < _UNLIMITED_BYTES:
            return int(int(text) * CGROUP_SHARE)
    return None
