"""How far a replay as one stream has come, kept beside its snapshot now and then: the same command goes on from there.

    .OUT.stream/state.bin    everything a restart needs (collector/durable/image.py), and how many turns are in it

Recordings are read again up to there, and not learned: the turns are those of before, since files, settings and version
are. A replay that takes less than ``KEEP_S`` leaves nothing on the disk, nor one of standard input or of a file that is
written to meanwhile: neither can be read again as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from collector.config import Config
from collector.durable import StateStore
from collector.recordings import STDIN
from collector.runtime import Clock, PrintLine, StartError
from collector.worker import Pipeline

if TYPE_CHECKING:
    from collector.fleet.bulk import WorkDirectory

KEEP_S: Final = 15
"""Seconds from one keeping to the next."""
SHARE: Final = 30
"""So many times as long as a keeping took is replayed before the next one."""


class StreamProgress:
    """``resume`` before the first turn, ``keep_when_due`` after each, at the end ``remove`` or ``release``."""

    def __init__(self, paths: Sequence[Path], out: Path, config: Config, clock: Clock, note: PrintLine) -> None:
        self._places = [str(path) for path in paths]
        self._path = out.with_name(f".{out.name}.stream")
        self._store = StateStore(self._path)
        self._config = config
        self._clock = clock
        self._note = note
        self._work: WorkDirectory | None = None
        self._begun_unix_nano = clock.unix_nano()
        self._due_ns = clock.monotonic_ns() + KEEP_S * 10**9
        self._keeps = STDIN not in self._places

    @property
    def is_kept(self) -> bool:
        """There is something to go on from."""
        return self._work is not None and self._store.is_there

    def resume(self, pipeline: Pipeline) -> None:
        """Let it be as it was when it was kept, if it was; ``applied_seq`` is then the last turn that it knows."""
        if self._keeps and self._store.is_there:
            self._take()
            self._store.load(pipeline.restore)

    def keep_when_due(self, pipeline: Pipeline) -> None:
        """Keep what is learned up to this turn; where that cannot be, it is said once, and the replay goes on."""
        begun_ns = self._clock.monotonic_ns()
        if not self._keeps or begun_ns < self._due_ns:
            return
        try:
            if self._work is None:
                self._take()
            self._store.write(pipeline.whole_state().pieces(), pipeline.applied_seq)
        except (StartError, OSError) as error:
            self._note(f"how far it is is not kept: {error}")
            self._keeps = False
        now_ns = self._clock.monotonic_ns()
        self._due_ns = now_ns + max(KEEP_S * 10**9, SHARE * (now_ns - begun_ns))

    def remove(self) -> None:
        """The replay is at its end."""
        if self._work is not None:
            self._work.remove()

    def release(self) -> None:
        """Let another process in; what is kept stays."""
        if self._work is not None:
            self._work.release()

    def _take(self) -> None:
        # 20 ms of imports that a short replay need not pay
        from collector.fleet.bulk import WorkDirectory, find_bulk_files  # noqa: PLC0415

        files = find_bulk_files(self._places)
        changed = [file.name for file in files if int(file.changed) >= self._begun_unix_nano]
        if changed:
            raise StartError(f"{changed[0]} is written to")
        work = WorkDirectory(self._path, self._clock, self._note)
        work.take(files, self._config)
        self._work = work
