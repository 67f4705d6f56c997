"""What survives: a checkpoint, one process in its directory, and where a start reads the log again.

    tracefit.lock        locked (flock) as long as a process uses the directory; says who, until it has stopped in order
    state.bin            the checkpoint: written under another name, flushed, renamed, so that a whole one is there
    state.bin.corrupt    one that could not be read, kept for inspection

A checkpoint holds the learners, the calibration of the engines, up to when each engine's rows are learned, and where a
start reads the log again. It has no steps or requests that wait. :mod:`.durability` says when it is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import msgspec

from collector.config import Config, refuse_special
from collector.decode import Telemetry
from collector.join import Joiner, newest_unix_ns
from collector.runtime import StartError
from collector.telemetry import Restored
from exporters.snapshot_file import SNAPSHOT_NAME, write_atomically
from online.state import STATE_BYTES_MAX, StateError, Tree, decode

NAME: Final = "state.bin"
LOCK_NAME: Final = "tracefit.lock"
PROGRESS: Final = "progress"
STATES_NAME: Final = "states"
"""The folder of the states that a pull writes."""
CONFIGURATION_BYTES_MAX: Final = 8 << 20
"""Of a configuration in a checkpoint, unpacked. One takes 1 to 2 MB: 450 of them are more than ``STATE_BYTES_MAX``."""
_PAUSE_MAX_NS: Final = 10_000_000_000
"""Twice the pause of an SDK's exporter."""
_log = logging.getLogger(__name__)


Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Position(msgspec.Struct, frozen=True):
    """Position of a checkpoint in the log, as numbers of entries."""

    newest: Number = 0
    """The last entry that the join has seen."""
    read_from: Number = 1
    """A start reads from here on: all smaller ones are learned."""


class UnlearnedExports:
    """Finds the oldest log entry that is not learned, by the newest event of each emitter in each batch.

    A batch is learned when the join needs no event of it any more. Nothing waits in the join for longer than
    ``join_timeout_s`` + ``allowed_lateness_s``, so that older batches are learned whatever an idle emitter still holds.
    Age is counted from batch to batch, and a pause or a jump of the clock counts for ``_PAUSE_MAX_NS`` at most.
    """

    def __init__(self, join: Config) -> None:
        self._longest_ns = int((join.join_timeout_s + join.allowed_lateness_s) * 1e9)
        self._batches: deque[tuple[int, int, dict[str, int]]] = deque()
        self._arrived_unix_ns = self._now_ns = 0

    def begin(self, first: int, arrived_unix_ns: int) -> None:
        """Begin a batch with the number of its first entry and the arrival of its last export."""
        self._now_ns += min(max(arrived_unix_ns - self._arrived_unix_ns, 0), _PAUSE_MAX_NS)
        self._arrived_unix_ns = arrived_unix_ns
        self._batches.append((first, self._now_ns, {}))

    def record(self, telemetry: Telemetry) -> None:
        """Record the newest event of one resource of the batch."""
        # spans of the API process complete what comes with other spans
        newest_ns = max(newest_unix_ns(telemetry), telemetry.arrived_unix_ns if telemetry.api else 0)
        newest = self._batches[-1][2]
        newest[telemetry.instance] = max(newest.get(telemetry.instance, 0), newest_ns)

    def first_needed(self, joiner: Joiner, following: int) -> int:
        """Number of the oldest entry that is not learned; ``following`` where all are."""
        needed: dict[str, float] = {}
        for emitter in joiner.emitters:
            needed[emitter.instance] = min(emitter.waiting.needed_unix_ns, needed.get(emitter.instance, math.inf))
        oldest = min(needed.values(), default=math.inf)
        begins = (int(rows.end_ns[0] - 1e3 * rows.elapsed_us[0]) for rows in joiner.rows.waiting)
        held = min(begins, default=math.inf)

        def is_learned(instance: str, newest_unix_ns: int) -> bool:
            return newest_unix_ns < min(needed.get(instance, oldest), held)

        while self._batches:
            first, begun_ns, newest = self._batches[0]
            too_old = self._now_ns - begun_ns > self._longest_ns
            if not too_old and not all(is_learned(*each) for each in newest.items()):
                return first
            self._batches.popleft()
        return following


def state_files(path: Path) -> list[Path]:
    """A state file, or all below a directory (``*.bin``); OSError for a device."""
    refuse_special(path)
    return sorted(each for each in path.rglob("*.bin") if each.is_file()) if path.is_dir() else [path]


# --- the directory --------------------------------------------------------------------------------------------------


class Directory:
    """``take`` at the start, before anything in it is read or written; ``release`` at the end, after all is written."""

    def __init__(self, path: Path, named: str = "directory") -> None:
        self.path = path
        self._named = named
        self._descriptor = -1
        self.killed = ""
        """The process before, if it did not stop in order."""

    def take(self) -> None:
        """Make the directory if need be and lock it.

        Raises:
            StartError: another process uses it, it cannot be written to, or a file of ours there is none.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for each in (self.path / name for name in (NAME, LOCK_NAME, SNAPSHOT_NAME)):  # a pipe waits for its writer
                if each.exists() and not (each.is_file() or each.is_dir()):
                    raise StartError(f"cannot use {self._named} {self.path}: {each.name} is not a file; remove it")
            self._descriptor = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartError(f"cannot write to {self._named} {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = f"{self._read()}; give each one of its own"
            self._close()
            raise StartError(f"another process uses {self._named} {self.path}: {holder}") from None
        except OSError as error:  # some network file systems
            _log.warning("%s cannot be locked (%s): let no other process use it", self.path, error.strerror)
        self.killed = self._read()
        self._write(f"process {os.getpid()} on {socket.gethostname()}")

    def release(self) -> None:
        """Record an orderly stop and release the lock."""
        if self._descriptor >= 0:
            self._write("")
            self._close()

    def _read(self) -> str:
        return os.pread(self._descriptor, 1024, 0).decode("utf-8", "replace")

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1

    def _write(self, holder: str) -> None:
        with contextlib.suppress(OSError):  # the disk may be full: the lock holds all the same
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, holder.encode(), 0)


# --- the file -------------------------------------------------------------------------------------------------------


class CheckpointFile:
    """The checkpoint's file; used by the starting thread, then by the writer's."""

    def __init__(self, directory: Path, configs_max: int) -> None:
        self._path = directory / NAME
        self._bytes_max = max(STATE_BYTES_MAX, configs_max * CONFIGURATION_BYTES_MAX)
        self.restored = Restored.EMPTY
        """What a start began with."""
        self.restored_unix_s = 0.0
        """When that was written; 0 without one."""
        self.problem = ""
        """Why it could not be used; shown by readiness."""

    def load(self, restore: Callable[[Tree], Position]) -> Position:
        """Hand the checkpoint to ``restore``; its position, the first one without any.

        One that cannot be used is put aside and logged as an error. What a killed process has left half written goes.
        """
        for half_written in self._path.parent.glob(f".{NAME}.tmp.*"):
            with contextlib.suppress(OSError):
                half_written.unlink()
        try:
            data, written_unix_s = self._path.read_bytes(), self._path.stat().st_mtime
            position = restore(decode(data, self._bytes_max))
        except FileNotFoundError:
            return Position()
        except (OSError, StateError) as error:
            self.restored, self.problem = Restored.COLD, f"{NAME}: {error}"
            _log.error("cold start, everything is learned anew: %s", self.problem)
            with contextlib.suppress(OSError):
                self._path.replace(self._path.with_name(f"{NAME}.corrupt"))
            return Position()
        self.restored, self.restored_unix_s = Restored.CHECKPOINT, written_unix_s
        return position

    def write(self, data: bytes) -> None:
        """Write the next checkpoint. OSError if it could not be written; the one before is as it was."""
        write_atomically(self._path, data, 0o600)

    def read(self) -> bytes | None:
        """Read the newest checkpoint, for merges elsewhere; None without one; from any thread."""
        try:
            return self._path.read_bytes()
        except OSError:
            return None
