"""What survives: checkpoints in two files, one process in their directory, and where a start reads the log again.

    tracefit.lock          locked (flock) as long as a process uses the directory; says who, and what it has not saved
    state.bin              newest checkpoint: written under another name, flushed, renamed
    state.bin.previous     what ``state.bin`` was until then
    state.bin.corrupt      one that could not be read, kept for inspection

A checkpoint holds the learners, the calibration of the engines, up to when each engine's rows are learned, and where a
start reads the log again. It has no steps or requests that wait. At any moment one whole file is there, once there was
one. :mod:`.durability` says when they are written.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from collector.config import Config, ConfigError
from collector.decode import Telemetry
from collector.join import Joiner, newest_unix_ns
from collector.runtime import Clock, StartError, SystemFiles, sync_directory
from collector.telemetry import Restored
from online.state import LEARNERS, StateError, Tree, decode, encode, part_of_tree

NAME: Final = "state.bin"
PREVIOUS_NAME: Final = "state.bin.previous"
STATE_FILES: Final = (NAME, PREVIOUS_NAME)
LOCK_NAME: Final = "tracefit.lock"
PROGRESS: Final = "progress"
STATES_NAME: Final = "states"
"""The folder of the states that a pull writes."""
STATE_BYTES_MAX: Final = 1 << 31
_LOCK_BYTES_MAX: Final = 1024
_PAUSE_MAX_NS: Final = 10_000_000_000
"""Twice the pause of an SDK's exporter."""
_log = logging.getLogger(__name__)


Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Position(NamedTuple):
    """Where the log stands for a checkpoint, in numbers of entries."""

    newest: Number = 0
    """The last entry that the join has seen."""
    read_from: Number = 1
    """A start reads from here on: all smaller ones are learned."""


class UnlearnedExports:
    """Which entry of the log is the oldest that is not learned: by batch, the newest event of each emitter in it.

    A batch is learned when the join needs no event of it any more. Nothing waits in the join for longer than
    ``join_timeout_s`` + ``allowed_lateness_s``, so that older batches are learned whatever an idle emitter still holds.
    Age is counted from batch to batch, and a pause or a jump of the clock counts for ``_PAUSE_MAX_NS`` at most.
    """

    def __init__(self, join: Config) -> None:
        self._longest_ns = int((join.join_timeout_s + join.allowed_lateness_s) * 1e9)
        self._batches: deque[tuple[int, int, dict[str, int]]] = deque()
        self._arrived_unix_ns = self._now_ns = 0

    def begin(self, first: int, arrived_unix_ns: int) -> None:
        """A batch is to be joined: number of its first entry, and when its last export came in."""
        self._now_ns += min(max(arrived_unix_ns - self._arrived_unix_ns, 0), _PAUSE_MAX_NS)
        self._arrived_unix_ns = arrived_unix_ns
        self._batches.append((first, self._now_ns, {}))

    def record(self, telemetry: Telemetry) -> None:
        """What one resource of the batch said."""
        # spans of the API process complete what comes with other spans
        newest_ns = max(newest_unix_ns(telemetry), telemetry.arrived_unix_ns if telemetry.api else 0)
        newest = self._batches[-1][2]
        newest[telemetry.instance] = max(newest.get(telemetry.instance, 0), newest_ns)

    def first_needed(self, joiner: Joiner, following: int) -> int:
        """Number of the oldest entry that is not learned; ``following`` where all are."""
        needed = {key[1]: emitter.needed_unix_ns for key, emitter in joiner.emitters.items()}
        held, oldest = joiner.held_rows_unix_ns, joiner.needed_unix_ns

        def is_learned(instance: str, newest_unix_ns: int) -> bool:
            bounds = (needed.get(instance, oldest), held)
            return all(bound is None or newest_unix_ns < bound for bound in bounds)

        while self._batches:
            first, begun_ns, newest = self._batches[0]
            too_old = self._now_ns - begun_ns > self._longest_ns
            if not too_old and not all(is_learned(*each) for each in newest.items()):
                return first
            self._batches.popleft()
        return following


def state_files(path: Path) -> list[Path]:
    """A state file, or all below a directory (``*.bin``)."""
    return sorted(each for each in path.rglob("*.bin") if each.is_file()) if path.is_dir() else [path]


# --- the directory --------------------------------------------------------------------------------------------------


def check_directory(path: Path, named: str = "directory") -> None:
    """Raise ConfigError, which names it so, if it is a file."""
    if os.path.isfile(path):  # noqa: PTH113 -- False where Path.is_file raises: making it then says what is wrong
        raise ConfigError(named, f"{path} is a file, and a directory is wanted")


class Directory:
    """``take`` at the start, before anything in it is read or written; ``release`` at the end, after all is written."""

    def __init__(self, path: Path, clock: Clock, named: str = "directory") -> None:
        self.path = path
        self._named = named
        self._clock = clock
        self._descriptor = -1
        self._holder = ""
        self.killed = ""
        """The process before, if it did not stop in order."""
        self.unsaved: dict[str, int] = {}
        """What that process had noted last."""

    def take(self) -> None:
        """Make the directory if need be and lock it.

        Raises:
            ConfigError: it is a file.
            StartError: another process uses it, or it cannot be written to.
        """
        check_directory(self.path, self._named)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartError(f"cannot write to {self._named} {self.path}: {error.strerror}") from None
        if not (self.path / LOCK_NAME).is_file():  # of a named pipe nothing is read again
            self._close()
            raise StartError(f"cannot write to {self._named} {self.path}: {LOCK_NAME} is no file")
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._read()[0] or "one that has not said yet who it is"
            self._close()
            raise StartError(f"another process uses {self._named} {self.path}: {holder}") from None
        except OSError as error:  # some network file systems
            _log.warning("%s cannot be locked (%s): let no other process use it", self.path, error.strerror)
        self.killed, noted = self._read()
        with contextlib.suppress(ValueError, AttributeError):
            self.unsaved = {name: count for name, count in json.loads(noted).items() if isinstance(count, int)}
        since = datetime.fromtimestamp(self._clock.unix_nano() // 10**9, UTC)
        self._holder = f"process {os.getpid()} on {socket.gethostname()}, since {since:%Y-%m-%d %H:%M:%S} UTC"
        self._write(self._holder)

    def note(self, **unsaved: int) -> None:
        """Leave to the next process what is lost if this one is killed now."""
        if self._descriptor >= 0:
            self._write(f"{self._holder}\n{json.dumps(unsaved)}")

    def release(self) -> None:
        """Say that this process stopped in order, and let another one in."""
        if self._descriptor >= 0:
            self._write("")
            self._close()

    def _read(self) -> tuple[str, str]:
        text = os.pread(self._descriptor, _LOCK_BYTES_MAX, 0).decode("utf-8", "replace")
        holder, _, noted = text.partition("\n")
        return holder.strip(), noted

    def _write(self, text: str) -> None:
        """Replace the note in one call: of two, a kill between them would leave both notes mixed."""
        with contextlib.suppress(OSError):  # the disk may be full: the lock holds all the same
            os.pwrite(self._descriptor, text.encode()[:_LOCK_BYTES_MAX].ljust(_LOCK_BYTES_MAX), 0)

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1


# --- the files ------------------------------------------------------------------------------------------------------


class CheckpointFiles:
    """Used by the starting thread, then by the writer's."""

    def __init__(self, directory: Path, files: SystemFiles | None = None) -> None:
        self.directory = directory
        self._path = directory / NAME
        self._previous = directory / PREVIOUS_NAME
        self._files = files or SystemFiles()
        self._positions: list[Position] = []
        self._newest_is_whole = False
        self.restored = Restored.EMPTY
        """What a start began with."""
        self.restored_name = ""
        self.restored_unix_s = 0.0
        """The file, and when it was written; 0 without one."""
        self.problem = ""
        """Why a file could not be used; shown by readiness."""

    def covered(self) -> Position | None:
        """What both files know of the log; None while there is one alone."""
        return self._positions[0] if len(self._positions) > 1 else None

    def load(self, restore: Callable[[Tree], tuple[Position, list[str]]]) -> Position:
        """Hand the newest usable checkpoint to ``restore``; its position, the first one without any.

        Files that cannot be used are put aside and logged as errors.
        """
        for path, outcome in ((self._path, Restored.NEWEST), (self._previous, Restored.PREVIOUS)):
            try:
                data, written_unix_s = _read(path), path.stat().st_mtime
                position, left_out = restore(decode(data))
            except FileNotFoundError:
                continue
            except OSError as error:
                self._report(path, error.strerror or type(error).__name__)
                continue
            except StateError as error:
                self._report(path, str(error))
                with contextlib.suppress(OSError):
                    self._files.replace(path, path.with_name(f"{path.name}.corrupt"))
                continue
            if left_out:
                _log.warning("models of the state that are not configured were left out: %s", ", ".join(left_out))
            self._positions = [position]
            self._newest_is_whole = outcome is Restored.NEWEST
            self.restored, self.restored_name, self.restored_unix_s = outcome, path.name, written_unix_s
            return position
        if self.problem:
            _log.error("cold start, everything is learned anew; no state file could be used: %s", self.problem)
            self.restored = Restored.COLD
        return Position()

    def write(self, data: bytes, position: Position) -> None:
        """Write the next checkpoint. OSError if it could not be written; the older ones are as they were."""
        temporary = self.directory / f".{NAME}.tmp"
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        descriptor = self._files.open(temporary)
        try:
            self._files.write_all(descriptor, [data])
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
        sync_directory(self.directory)
        self._positions = [*self._positions[-1:], position]
        self._newest_is_whole = True

    def remove_previous(self) -> bool:
        """Make room on the volume if the newest file is whole; whether there was an older one."""
        if not (self._newest_is_whole and self._previous.exists()):
            return False
        self._files.unlink(self._previous)
        return True

    def learned(self) -> bytes | None:
        """What the newest checkpoint has learned, as a state file of its own; None before the first; any thread."""
        for path in (self._path, self._previous):  # between two renames there is only the second
            try:
                return encode({LEARNERS: part_of_tree(decode(_read(path)), LEARNERS)})
            except FileNotFoundError:
                continue
            except (OSError, StateError) as error:
                _log.warning("%s cannot be shown: %s", path.name, error)
        return None

    def _report(self, path: Path, problem: str) -> None:
        self.problem = "; ".join(filter(None, (self.problem, f"{path.name}: {problem}")))
        _log.error("state file cannot be used: %s", self.problem)


def _read(path: Path) -> bytes:
    if path.is_fifo():
        raise StateError("is a named pipe")  # whoever opens one waits for a process that writes
    with path.open("rb") as file:
        return file.read(STATE_BYTES_MAX)
