"""Writes what survives a restart: checkpoints on a timer and at the end, the log in between; and restores it.

    worker thread:  learn a batch ─► tick: is one due? take the tree ─┐         queue: record ─► log
    writer thread:                                                     └► encode ─► state.bin ─► free the log

With ``durability: log`` a start reads again what was not learned, and rows before an engine's mark are skipped. With
``durability: memory`` a kill loses what came after the last checkpoint, and a start says how old that is.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from collector.config import Config
from collector.decode import Export
from collector.runtime import Clock, Health, StartError, SystemFiles, Task, sentence
from collector.telemetry import Metrics, Outcome, table
from online.state import Tree, encode

from .checkpoint import NAME, CheckpointFile, Directory, Position
from .log import Log, LogFullError, is_segment

if TYPE_CHECKING:
    from .pipeline import Pipeline

WRITER: Final = "checkpoint-writer"
PAUSE_S: Final = 60.0
CHECK_IN_TIMEOUT_S: Final = 120.0
"""A write that takes longer hangs in the kernel."""
_EARLY_NS: Final = 1_000_000_000
"""Shortest pause between checkpoints that a full log or volume requests."""
_LOG_SHARE: Final = 0.5
"""Share of its capacity from which the log requests a checkpoint."""
_MIB: Final = 1 << 20
_FULL: Final = "the log is full"

_log = logging.getLogger(__name__)


def fitted_capacity(config: Config, files: SystemFiles) -> tuple[int, str]:
    """Bytes that the log may have, and a sentence if they are fewer than configured.

    A log that fills its volume keeps out the checkpoint that would empty it. So it gets a third of what the volume has
    for it, the last checkpoint, and the next one while that is written. A volume that does not tell its size lowers
    nothing.
    """
    directory, wanted_bytes = Path(config.directory), config.log_capacity_mib * _MIB
    try:
        volume = files.volume(directory)
        own = [path for path in directory.iterdir() if path.name == NAME or is_segment(path)]
        room_bytes = volume.free + sum(path.stat().st_size for path in own)
    except OSError:
        return wanted_bytes, ""
    if not volume.total or room_bytes // 3 >= wanted_bytes:
        return wanted_bytes, ""
    return room_bytes // 3, (
        f"the log has {room_bytes / 3 / _MIB:.3g} MiB instead of {config.log_capacity_mib} (log_capacity_mib), "
        f"a third of what the volume of {directory} has room for"
    )


class Durability:
    """``start`` and ``stop`` once; ``record`` by whoever fills the queue, the rest by the worker."""

    def __init__(
        self,
        config: Config,
        pipeline: Pipeline,
        *,
        metrics: Metrics,
        health: Health,
        clock: Clock,
        files: SystemFiles,
        on_freed: Callable[[], None],
    ) -> None:
        """``on_freed`` is called when the log may have more room than before."""
        path = Path(config.directory)
        self._config = config
        self._files = files
        self._directory = Directory(path)
        self.checkpoint = CheckpointFile(path, config.configs_max)
        self.log = Log(path, config.log_capacity_mib << 20, self._files)
        self.has_log = config.durability == "log"
        """Whether what is acknowledged and not learned is there for the next process."""
        self._pipeline = pipeline
        self._metrics = metrics
        self._clock = clock
        self._on_freed = on_freed
        self._interval_ns = int(config.checkpoint_interval_s * 1e9)
        self._backlog: Iterator[Export] = iter(())
        self._taken_ns = clock.monotonic_ns()
        self._dirty = False
        self._refusing = ""
        """Why exports are refused now."""
        self._lost = self._cramped = self._unsaved = ""
        """What a start found lost; why the log has less room than configured; why the last checkpoint is in no file."""
        self._pending: deque[tuple[Tree, Position]] = deque()
        """Checkpoints that were taken, until they are written: one, and the last one of a stop behind it."""
        self._task = Task(WRITER, self._write_pending, health=health, timeout_s=CHECK_IN_TIMEOUT_S)
        metrics.follow(table.SIZE_BYTES, lambda: self.log.size_bytes, "log")
        metrics.follow(table.CAPACITY_BYTES, lambda: self.log.capacity_bytes if self.has_log else 0, "log")

    def start(self) -> None:
        """Take the directory, restore, find the log's rest, begin to write."""
        self._directory.take()
        # what a log has is read again: its marks hold, also those of a clock that was set back
        now_unix_ns = 0 if self.has_log else self._clock.unix_nano()
        position = self.checkpoint.load(partial(self._pipeline.from_checkpoint, now_unix_ns=now_unix_ns))
        self._metrics.set(table.STATE_RESTORED, 1, self.checkpoint.restored)
        self._metrics.set(table.STATE_WRITTEN, self.checkpoint.restored_unix_s)
        if self.has_log:
            self.log.capacity_bytes, self._cramped = fitted_capacity(self._config, self._files)
            if self._cramped:
                _log.warning("%s", self._cramped)
            try:
                self.log.open(position.read_from, position.newest)
            except OSError as error:
                where = error.filename or self._directory.path
                raise StartError(f"cannot use the log, {where}: {error.strerror}") from None
            self._backlog = self.log.entries(position.read_from)
        self._tell_beginning(position)
        self._task.start()

    def _tell_beginning(self, position: Position) -> None:
        """Log one line: the checkpoint that this process continues from, its age, and what is lost since."""
        restored_unix_s, killed = self.checkpoint.restored_unix_s, self._directory.killed
        age_s = max(self._clock.unix_nano() / 1e9 - restored_unix_s, 0.0)
        text = f"continuing from {NAME}, {age_s:.0f} s old" if restored_unix_s else "no state"
        if self.log.newest:
            text += f"; the log is read from entry {position.read_from} to {self.log.newest}"
        self._metrics.set(table.LOST_AT_START, self.log.lost_entries)
        if self.log.lost_entries:
            self._lost = f"{self.log.lost_entries} entries of the log"
        elif killed and not self.has_log:
            when = f"in the {age_s:.0f} s since its checkpoint at most" if restored_unix_s else "since its start"
            self._lost = f"what {killed} learned {when}, and what waited in the join then (durability: memory)"
        if self._lost:
            _log.warning("%s. Lost: %s", text, self._lost)
        elif restored_unix_s or self.log.newest:
            _log.info("%s", text)

    def stop(self) -> bool:
        """Write what was handed over last; False if that was not possible."""
        self._task.stop(None)
        while self._pending:
            self._write_pending()
        if self._unsaved:
            since = f"what came since the one before: {'in the log' if self.has_log else 'lost'}"
            _log.error("stopped without a last checkpoint (%s); %s", self._unsaved, since)
        self.log.close()
        self._directory.release()
        return not self._unsaved

    def readiness_detail(self) -> dict[str, str]:
        """For readiness: what was restored, why exports are refused, why the last checkpoint was not written."""
        return {
            "state_at_start": str(self.checkpoint.restored),
            "state_problem": self.checkpoint.problem,
            "lost": self._lost,
            "log_problem": self._cramped,
            "refused": self._refusing,
            "unsaved": self._unsaved,
        }

    def record(self, export: Export) -> Export | Outcome:
        """Append an export to the log and number it, before it enters the queue; returns why not if that fails."""
        try:
            recorded = self.log.append(export) if self.has_log else export
        except OSError as error:
            where = error.filename or self._directory.path
            problem = f"the log cannot be written, {where}: {error.strerror}"
            problem = _FULL if isinstance(error, LogFullError) else problem
            if problem != self._refusing:  # one line per change
                _log.error("%s; exports are refused", problem)
            self._refusing = problem
            return Outcome.LOG
        if self._refusing:
            self._refusing = ""
            _log.info("exports are accepted again")
        return recorded

    # --- the worker's -----------------------------------------------------------------------------------------------

    def read_unlearned(self, bytes_max: int) -> list[Export]:
        """The next entries of an earlier process, until there are so many bytes; none when all were taken."""
        taken: list[Export] = []
        size_bytes = 0
        while size_bytes < bytes_max and (export := next(self._backlog, None)) is not None:
            taken.append(export)
            size_bytes += len(export.payload)
        self._metrics.add(table.LOG_REPLAYED, sum(export.spans for export in taken))
        return taken

    def record_batch(self) -> None:
        """Note that a batch was processed, so that the next checkpoint differs from the last one."""
        self._dirty = True

    def tick(self, *, final: bool = False) -> None:
        """Take a checkpoint if it is due and hand it to the writer."""
        if not (self._dirty and final) and not self._is_due():
            return
        self._taken_ns = self._clock.monotonic_ns()
        try:
            if self._refusing == _FULL:
                self._pipeline.flush_for_log()  # nothing comes that could complete what waits
            tree, position = self._pipeline.to_checkpoint()
        except Exception as error:  # noqa: BLE001 -- a fault of ours must not end the receiving
            self._report_failure(error)
            return
        self._dirty = False
        self._pending.append((tree, position))
        self._task.notify()

    def _is_due(self) -> bool:
        """Whether a checkpoint is due, by time or because log or volume fill up; not while one is being written."""
        age_ns = self._clock.monotonic_ns() - self._taken_ns
        fills_up = self.has_log and (self._log_is_full() or bool(self._refusing))
        is_due = (self._dirty and age_ns >= self._interval_ns) or (fills_up and age_ns >= _EARLY_NS)
        return is_due and not self._pending

    def _log_is_full(self) -> bool:
        return self.log.size_bytes > _LOG_SHARE * self.log.capacity_bytes

    # --- the writer's -----------------------------------------------------------------------------------------------

    def _write_pending(self) -> float:
        if self._pending:
            try:
                self._write(*self._pending[0])
            except Exception as error:  # noqa: BLE001 -- as in tick
                self._report_failure(error)
            finally:
                self._pending.popleft()
        return PAUSE_S

    def _write(self, tree: Tree, position: Position) -> None:
        """Write a checkpoint, and free what of the log it has learned."""
        self.checkpoint.write(encode(tree))
        self._unsaved = ""
        self._metrics.add(table.WRITES, 1, "checkpoint", "done")
        self._metrics.set(table.STATE_WRITTEN, self._clock.unix_nano() / 1e9)
        waits = self._config.forward and not self._log_is_full()  # for the backend, as long as there is room
        self.log.free(min(position.read_from, self.log.forwarded_seq + 1) if waits else position.read_from)
        self._on_freed()

    def _report_failure(self, error: Exception) -> None:
        """Log once why the last checkpoint was not written, with a traceback for our own fault, and request another."""
        self._metrics.add(table.WRITES, 1, "checkpoint", "failed")
        problem = f"state not written: {sentence(error)}"
        if problem != self._unsaved:
            _log.error("%s", problem, exc_info=None if isinstance(error, OSError) else error)
        self._unsaved = problem
        self._dirty = True  # a race with the worker asks for one more checkpoint at worst
