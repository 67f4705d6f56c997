"""State files: one process per directory, written whole, the last two kept.

The directory that holds what survives: one process at a time, and nothing in it that a killed one left half written.

``journal.lock`` is locked (flock) as long as a process uses the directory, whatever its durability, and says who that
is. A process that stops in order empties it, so that what stands there at a start is the name of one that was killed.

What is in a sidecar's state file: everything a restart needs, so that stop and restart is no restart.

    progress   how far journal and snapshots had come
    spans      span ids seen lately
    join       every engine process's window, requests and API spans that wait, rows held for their turn, KV publishers
    learners   everything learned, partial blocks included (the part that ``replay --state`` writes alone)

What of each class is saved stands in the class (``STATE``); the file is described in online/state/file.py. Decoded
layouts (collector/decode/columnar.py) are a cache and stay out. Bounds and settings are the new process's: what is held
beyond a bound that has become smaller goes as it would have gone anyway.

Guarantee: a pipeline restored from the state of another one gives bitwise the same rows and coefficients for the same
further exports (tests/property/test_sidecar_state.py).

The state on disk: two generations, so that one bad file costs little.

    state.bin           newest          written under another name, fsynced, renamed
    state.bin.previous  the one before  what state.bin was until then
    state.bin.corrupt   one that could not be read, kept for inspection

Guarantee: at any moment one whole file is there under one of the two names, once there was one. What both contain may
be dropped from the journal, what only the newest contains may not.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from collector.runtime import Clock, Files, StartError, SystemFiles, sync_directory
from collector.telemetry import Restored
from online.state import LEARNERS, Count, Image, Seal, StateError, decode_image, saved

LOCK_NAME: Final = "journal.lock"
"""Also what versions lock that did so with a journal only."""
HOLDER_BYTES_MAX: Final = 256
_HALF_WRITTEN = re.compile(r"\.+(snapshot\.json(\.probe)?|[0-9a-f]{12}\.blis\.yaml|state\.bin)\.tmp(\.\d+)?")
"""Temporary names of exporters/snapshot_file.py and collector/service/store.py alone: the directory may be shared."""

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


PROGRESS, SPANS, JOIN = "progress", "spans", "join"


@dataclass(frozen=True, slots=True)
class Progress:
    """``seq`` is the last journal entry in a state, ``generation`` the last snapshot published before it."""

    STATE = saved("progress")

    seq: Count = 0
    generation: Count = 0


def read_image(data: bytes) -> Image:
    """The image in a file.

    Raises:
        StateError: truncated, corrupt, not a state file, or of a version that cannot be read.
    """
    return decode_image(data)


def progress_of(image: Image) -> Progress:
    """How far it had come."""
    progress: Progress = image.load(PROGRESS, Progress)
    return progress


NAME = "state.bin"
PREVIOUS_NAME = "state.bin.previous"
STATE_FILES = (NAME, PREVIOUS_NAME)
STATE_BYTES_MAX = 1 << 31


class StateStore:
    """Used by the starting thread, then by the writer's."""

    def __init__(self, directory: Path, files: Files | None = None) -> None:
        self.directory = directory
        self._path = directory / NAME
        self._previous = directory / PREVIOUS_NAME
        self._files: Files = files or SystemFiles()
        self._seqs: list[int] = []
        self._newest_is_whole = False
        self.restored = Restored.EMPTY
        """What a start began with."""
        self.restored_name = ""
        self.restored_unix_s = 0.0
        """The file, and when it was written; 0 without one."""
        self.problem = ""
        """Why a file could not be used; shown by readiness."""

    @property
    def covered_seq(self) -> int:
        """The last journal entry that both generations contain: what comes before is needed no more."""
        return min(self._seqs) if len(self._seqs) > 1 else 0

    @property
    def saved_seq(self) -> int:
        """The last journal entry that one generation contains at least."""
        return self._seqs[-1] if self._seqs else 0

    def give_up_previous(self) -> bool:
        """Remove the older generation if the newest one is whole, for a volume without room; whether there was one."""
        if not (self._newest_is_whole and self._previous.exists()):
            return False
        self._files.unlink(self._previous)
        return True

    def load(self, restore: Callable[[Image], list[str]]) -> Progress:
        """Hand the newest usable state to ``restore``; unusable ones are put aside and logged as errors."""
        tried = False
        for path, outcome in ((self._path, Restored.NEWEST), (self._previous, Restored.PREVIOUS)):
            try:
                data = _read(path)
                written_unix_s = path.stat().st_mtime
            except FileNotFoundError:
                continue
            except OSError as error:
                self._report(path, error.strerror or type(error).__name__)
                tried = True
                continue
            tried = True
            try:
                image = read_image(data)
                progress = progress_of(image)
                left_out = restore(image)
            except StateError as error:
                self._report(path, str(error))
                self._put_aside(path)
                continue
            if left_out:
                _log.warning("models of the state that are not configured were left out: %s", ", ".join(left_out))
            self._seqs = [progress.seq]
            self._newest_is_whole = outcome is Restored.NEWEST
            self.restored, self.restored_name, self.restored_unix_s = outcome, path.name, written_unix_s
            return progress
        if tried:
            _log.error("cold start, everything is learned anew; no state file could be used: %s", self.problem)
            self.restored = Restored.COLD
        return Progress()

    def write(self, pieces: Iterable[bytes], seq: int) -> int:
        """Write a generation, its body piece by piece; the size of the file.

        Raises:
            OSError: it could not be written; the older ones are as they were.
        """
        temporary = self._path.parent / f".{NAME}.tmp"
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        descriptor = self._files.open(temporary)
        try:
            seal = Seal()
            size_bytes = self._append(descriptor, seal.head)
            for piece in pieces:
                seal.add(piece)
                size_bytes += self._append(descriptor, piece)
            self._files.overwrite(temporary, seal.head)
            self._files.sync(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        finally:
            os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            self._files.replace(self._path, self._previous)
        self._files.replace(temporary, self._path)
        sync_directory(self._path.parent)
        self._seqs = [*self._seqs[-1:], seq]
        self._newest_is_whole = True
        return size_bytes

    def _append(self, descriptor: int, data: bytes) -> int:
        view = memoryview(data)
        while view:
            written = self._files.write(descriptor, [view])  # type: ignore[list-item]  # bytes-like
            view = view[written:]
        return len(data)

    def learned(self) -> bytes | None:
        """What the newest state on disk knows, as a state file of its own: nothing that waits; None before the first.

        From any thread.
        """
        for path in (self._path, self._previous):  # between two renames there is only the second
            try:
                return read_image(_read(path)).alone(LEARNERS)
            except FileNotFoundError:
                continue
            except (OSError, StateError) as error:
                _log.warning("%s cannot be shown: %s", path.name, error)
        return None

    def _report(self, path: Path, problem: str) -> None:
        self.problem = "; ".join(filter(None, (self.problem, f"{path.name}: {problem}")))
        _log.error("state file cannot be used: %s", self.problem)

    def _put_aside(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            self._files.replace(path, path.with_name(f"{path.name}.corrupt"))


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(STATE_BYTES_MAX)
