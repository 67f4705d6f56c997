"""File systems that misbehave and clocks that jump, put into a real sidecar process."""

from __future__ import annotations

import errno
import random
import time

from collector.runtime.filesystem import SystemFiles
from collector.runtime.tasks import SystemClock


class FaultyFiles(SystemFiles):
    """The real file system, with spells of trouble: no room (half a record gets in), read-only, slow."""

    def __init__(self, kind: str, seed: int, *, share: float = 0.3, slow_s: float = 0.02) -> None:
        self._kind = kind
        self._rng = random.Random(seed)
        self._share = share
        self._slow_s = slow_s
        self.faults = 0

    def _hits(self, kind: str) -> bool:
        if self._kind != kind or self._rng.random() >= self._share:
            return False
        self.faults += 1
        return True

    def open(self, path):
        if self._hits("read-only"):
            raise OSError(errno.EROFS, "Read-only file system")
        return super().open(path)

    def write(self, descriptor, parts):
        if self._hits("slow"):
            time.sleep(self._slow_s)
        if self._hits("read-only"):
            raise OSError(errno.EROFS, "Read-only file system")
        if self._hits("full"):
            whole = b"".join(parts)
            if self._rng.random() < 0.5:
                super().write(descriptor, [whole[: self._rng.randrange(len(whole))]])
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(descriptor, parts)

    def overwrite(self, path, head):
        if self._hits("read-only"):
            raise OSError(errno.EROFS, "Read-only file system")
        super().overwrite(path, head)

    def truncate(self, descriptor, size_bytes):
        if self._kind == "full" and self._rng.random() < self._share / 3:
            raise OSError(errno.EIO, "Input/output error")
        super().truncate(descriptor, size_bytes)

    def sync(self, descriptor):
        if self._hits("slow"):
            time.sleep(self._slow_s)
        super().sync(descriptor)

    def replace(self, source, target):
        if self._hits("read-only"):
            raise OSError(errno.EROFS, "Read-only file system")
        super().replace(source, target)


class JumpingClock(SystemClock):
    """Wall clock that jumps by hours, both ways; the monotonic one goes on."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._offset_ns = 0

    def unix_nano(self) -> int:
        if self._rng.random() < 0.2:
            self._offset_ns = self._rng.randrange(-(10**14), 10**14)
        return super().unix_nano() + self._offset_ns
