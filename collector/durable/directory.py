"""The directory that holds what survives: one process at a time, and nothing in it that a killed one left half written.

``journal.lock`` is locked (flock) as long as a process uses the directory, whatever its durability, and says who that
is. A process that stops in order empties it, so that what stands there at a start is the name of one that was killed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from collector.runtime import Clock, StartError

LOCK_NAME: Final = "journal.lock"
"""Also what versions lock that did so with a journal only."""
HOLDER_BYTES_MAX: Final = 256
_HALF_WRITTEN = re.compile(r"\.+(snapshot\.json(\.probe)?|[0-9a-f]{12}\.blis\.yaml|state\.bin)\.tmp(\.\d+)?")
"""Temporary names of exporters/snapshot_file.py and collector/durable/store.py alone: the directory may be shared."""

_log = logging.getLogger(__name__)


class Directory:
    """``take`` at the start, before anything in it is read or written; ``release`` at the end, after all is written."""

    def __init__(self, path: Path, clock: Clock, named: str = "snapshot.directory") -> None:
        self.path = path
        self._named = named
        self._clock = clock
        self._descriptor = -1
        self.killed = ""
        """The process before, if it did not stop in order."""

    def take(self) -> None:
        """Make the directory if need be and lock it.

        Raises:
            StartError: another process uses it, or it cannot be written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartError(f"cannot write to {self._named} {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._read_holder() or "one that has not said yet who it is"
            self._close()
            raise StartError(f"another process uses {self._named} {self.path}: {holder}") from None
        except OSError as error:  # some network file systems
            _log.warning("%s cannot be locked (%s): let no other process use it", self.path, error.strerror)
        self.killed = self._read_holder()
        since = datetime.fromtimestamp(self._clock.unix_nano() // 10**9, UTC)
        self._say(f"process {os.getpid()} on {socket.gethostname()}, since {since:%Y-%m-%d %H:%M:%S} UTC")
        self._remove_half_written()

    def release(self) -> None:
        """Say that this process stopped in order, and let another one in."""
        if self._descriptor >= 0:
            self._say("")
            self._close()

    def _read_holder(self) -> str:
        return os.pread(self._descriptor, HOLDER_BYTES_MAX, 0).decode("utf-8", "replace").strip()

    def _say(self, holder: str) -> None:
        with suppress(OSError):  # the disk may be full: the lock holds all the same
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, holder.encode()[:HOLDER_BYTES_MAX], 0)

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1

    def _remove_half_written(self) -> None:
        with suppress(OSError):
            for path in self.path.iterdir():
                if _HALF_WRITTEN.fullmatch(path.name):
                    path.unlink(missing_ok=True)
                    _log.info("removed %s, which a process that was killed left half written", path.name)
