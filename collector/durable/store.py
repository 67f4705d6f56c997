"""The state on disk: two generations, so that one bad file costs little.

    state.bin           newest          written under another name, fsynced, renamed
    state.bin.previous  the one before  what state.bin was until then
    state.bin.corrupt   one that could not be read, kept for inspection

Guarantee: at any moment one whole file is there under one of the two names, once there was one. What both contain may
be dropped from the journal, what only the newest contains may not.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from collector.runtime import Files, SystemFiles, sync_directory
from collector.telemetry import Restored
from online.state import LEARNERS, Image, Seal, StateError

from .image import Progress, progress_of, read_image

NAME = "state.bin"
PREVIOUS_NAME = "state.bin.previous"
STATE_FILES = (NAME, PREVIOUS_NAME)
STATE_BYTES_MAX = 1 << 31

_log = logging.getLogger(__name__)


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
    def is_there(self) -> bool:
        """There is a generation on the disk, whole or not."""
        return self._path.exists() or self._previous.exists()

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
