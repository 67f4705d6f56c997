"""What survives: the state on a timer and at the end, the journal between two states, and what a start finds.

    worker thread: process batch ─► tick: state due? take ─┐              queue's lock: record ─► journal
    writer thread:                                         └► encode ─► two generations ─► drop journal entries in both

The worker takes the state apart from what goes on changing, because nobody else may look at the pipeline: large columns
of steps are lent, not copied (collector/join/window.py). The writer's thread does what can be slow: it encodes piece by
piece, so that there is never a second state in memory. A state
carries the number of the last journal entry in it: a start goes on with the entries behind it, in their order, before
anything new, so that each is learned exactly once.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from collector.config import Config
from collector.ingest import Export
from collector.runtime import Clock, Files, Health, StartError, SystemFiles, Task
from collector.telemetry import Metrics, Outcome, table
from online.state import Image, Taken

from .journal import Full, Journal, fitted_capacity, left_behind
from .store import Directory, StateStore

NAME = "state-writer"
CHECK_IN_TIMEOUT_S = 120.0
"""A write that takes longer hangs in the kernel: only a restart, with another volume, helps."""
_PAUSE_S = 60.0
"""A state that is handed over ends it."""
_EARLY_NS = 1_000_000_000
"""States asked for by a journal that fills up come at most this often."""
_SEGMENTS = 32
"""Files that a full journal has: what a state contains is removed by whole files."""
_JOURNAL_SHARE = 0.5
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

_log = logging.getLogger(__name__)


class Restartable(Protocol):
    """What is saved: the worker's pipeline."""

    applied_seq: int
    """Number of the last journal entry that has been processed."""

    def whole_state(self, generation: int) -> Taken:
        """Everything a restart needs, as it is now."""
        ...

    def restore(self, image: Image) -> list[str]:
        """Continue from a state; what of it is not configured. StateError if it does not fit."""
        ...


class Generations(Protocol):
    """Numbers of published snapshots, which go on after a restart."""

    @property
    def generation(self) -> int:
        """Number of the newest."""
        ...

    def resume(self, generation: int) -> None:
        """Go on behind this one."""
        ...


class Durability:
    """``start`` and ``stop`` once; ``record`` under the queue's lock, ``sync`` by receivers, the rest by the worker."""

    def __init__(
        self,
        config: Config,
        pipeline: Restartable,
        publisher: Generations,
        *,
        metrics: Metrics,
        health: Health,
        clock: Clock,
        files: Files | None = None,
    ) -> None:
        path = Path(config.snapshot.directory)
        self._config = config
        self._files = files = files or SystemFiles()
        self._directory = Directory(path, clock)
        self._pipeline = pipeline
        self._publisher = publisher
        self._metrics = metrics
        self._clock = clock
        self._interval_ns = int(config.state.interval_s * 1e9)
        self._writes_journal = config.durability == "journal"
        self._store = StateStore(path, files)
        self._journal: Journal | None = None
        self._made_journal = Journal(
            path,
            capacity_bytes=config.journal.capacity_mib << 20,
            segment_bytes=(config.journal.capacity_mib << 20) // _SEGMENTS,
            fsync=config.journal.fsync,
            files=files,
        )
        self._backlog: Iterator[Export] = iter(())
        self._taken_ns = clock.monotonic_ns()
        self._dirty = False
        self._failing: dict[Outcome, str] = {}
        """Why exports are refused now."""
        self._lost = ""
        self._cramped = ""
        """Why the journal has less room than was configured."""
        self._lock = threading.Lock()
        """Guards ``_pending`` and ``_writing``."""
        self._pending: tuple[Taken, int] | None = None
        self._writing = False
        self._unsaved = ""
        """Why what was handed over last is in no file."""
        self._ending = False
        self._given_up_bytes = 0
        """Of the journal, removed though they are in no state yet."""
        self._task = Task(NAME, self._write_pending, health=health, turn_timeout_s=CHECK_IN_TIMEOUT_S)
        metrics.follow(table.JOURNAL_BYTES, lambda: self._journal.size_bytes if self._journal else 0)
        metrics.follow(table.JOURNAL_CAPACITY, lambda: self._made_journal.capacity_bytes if self._writes_journal else 0)

    # --- start and stop ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take the directory, restore, find the journal's rest, begin to write."""
        self._directory.take()
        progress = self._store.load(self._pipeline.restore)
        self._metrics.set(table.STATE_RESTORED, 1, self._store.restored)
        self._metrics.set(table.STATE_WRITTEN, self._store.restored_unix_s)
        self._publisher.resume(progress.generation)
        self._fit_journal()
        if self._cramped:
            _log.warning("%s", self._cramped)
        if self._writes_journal or left_behind(self._store.directory):
            self._open_journal(progress.seq)
        self._tell_beginning()
        self._task.start()

    def _fit_journal(self) -> None:
        """Give the journal what the volume has beside three states; again with each state, for others fill it, too."""
        if self._writes_journal:
            self._made_journal.capacity_bytes, self._cramped = fitted_capacity(self._config, self._files)

    def _open_journal(self, applied_seq: int) -> None:
        try:
            self._made_journal.open(applied_seq)
        except OSError as error:
            raise StartError(f"cannot use the journal in {self._store.directory}: {error.strerror}") from None
        self._journal = self._made_journal
        self._backlog = self._journal.entries(applied_seq)
        damage = self._journal.damage
        self._metrics.set(table.JOURNAL_DAMAGED, damage.size_bytes)
        self._metrics.set(table.JOURNAL_LOST, damage.entries)
        if damage.size_bytes:
            tail = ", and what the last bytes were" if damage.tail_bytes else ""
            self._lost = f"{damage.entries} entries of the journal{tail}: {damage.size_bytes} bytes are damaged or cut"
            _log.warning("lost: %s; all others are learned from", self._lost)

    def _tell_beginning(self) -> None:
        """One line: what this process goes on from, how old that is, and what came after it and is lost."""
        restored_unix_s, killed = self._store.restored_unix_s, self._directory.killed
        age_s = max(self._clock.unix_nano() / 1e9 - restored_unix_s, 0.0)
        text = f"continuing from {self._store.restored_name}, {age_s:.0f} s old" if restored_unix_s else "no state"
        if self._journal is not None:
            _log.info("%s; the journal is learned from behind entry %d", text, self._pipeline.applied_seq)
        elif killed:
            self._lost = f"what {killed}, acknowledged after its last state (durability: memory)"
            _log.warning("%s; the process before was killed. Lost: %s", text, self._lost)
        elif restored_unix_s:
            _log.info("%s", text)

    def stop(self) -> bool:
        """Write what was handed over last; False if that was not possible."""
        self._task.stop(None)
        self._write_pending()
        if self._unsaved:
            _log.error("stopped without a last state: %s; %s", self._unsaved, self._missing_in_state())
        if self._journal is not None:
            self._journal.close()
        self._directory.release()
        return not self._unsaved

    def _missing_in_state(self) -> str:
        """What becomes of what the newest state lacks."""
        if self._writes_journal:
            given_up = f", but for {self._given_up_bytes} bytes that were removed" if self._given_up_bytes else ""
            return f"what it lacks is in the journal{given_up}"
        written_unix_s = self._metrics.value(table.STATE_WRITTEN)
        age_s = max(self._clock.unix_nano() / 1e9 - written_unix_s, 0.0)
        return f"what came in the last {age_s:.0f} s is lost" if written_unix_s else "everything that came is lost"

    def readiness_detail(self) -> dict[str, str]:
        """What this process began with, why exports are refused now, and why the last state is in no file."""
        details = {
            "state": str(self._store.restored),
            "state_problem": self._store.problem,
            "lost": self._lost,
            "journal_problem": self._cramped,
            "refused": "; ".join(tuple(self._failing.values())),
            "unsaved": self._unsaved,
        }
        return {name: text for name, text in details.items() if text}

    def learned(self) -> bytes | None:
        """What the newest state on disk knows, for others to merge; from any thread."""
        return self._store.learned()

    # --- in ---------------------------------------------------------------------------------------------------------

    def record(self, export: Export) -> Export | Outcome:
        """Write an export down before it may enter the queue."""
        if self._journal is None or not self._writes_journal:
            return export
        try:
            recorded = self._journal.append(export)
        except Full:
            return self._refuse(Outcome.JOURNAL_FULL, "journal is full")
        except OSError as error:
            return self._refuse(Outcome.JOURNAL_FAILED, f"journal cannot be written: {error.strerror}")
        return recorded

    def _refuse(self, reason: Outcome, text: str) -> Outcome:
        if reason not in self._failing:  # one line per change
            _log.error("%s; exports are refused", text)
        self._failing[reason] = text
        return reason

    def sync(self) -> None:
        """Return when all entries so far will survive as long as was promised; OSError if they will not."""
        if self._journal is None:
            return
        try:
            self._journal.sync(self._journal.last_seq)
        except OSError as error:
            self._refuse(Outcome.JOURNAL_FAILED, f"journal cannot be flushed: {error.strerror}")
            raise
        if self._failing:
            self._failing.clear()
            _log.info("exports are accepted again")

    # --- the worker's -----------------------------------------------------------------------------------------------

    def backlog(self, bytes_max: int) -> list[Export]:
        """The next entries of an earlier process; none when all were taken."""
        taken: list[Export] = []
        size_bytes = 0
        for export in self._backlog:
            if taken and size_bytes + len(export.payload) > bytes_max:
                self._backlog = itertools.chain([export], self._backlog)
                break
            taken.append(export)
            size_bytes += len(export.payload)
        self._metrics.add(table.JOURNAL_REPLAYED, sum(export.spans for export in taken))
        return taken

    @property
    def keeps_backlog(self) -> bool:
        """Whether what is acknowledged and not learned is there for the next process."""
        return self._writes_journal

    def due_in_s(self) -> float:
        """For how long the worker need not look after the state: exports that are refused do not wake it."""
        return _EARLY_NS / 1e9 if self._failing else math.inf

    def record_batch(self) -> None:
        """A batch has been processed: the next state differs from the last one."""
        self._dirty = True

    def tick(self, *, final: bool = False) -> bool:
        """Take the state if it is due and hand it to the writer; whether it was taken."""
        self._ending = self._ending or final
        if not (self._dirty and (final or self._due())) and not self._journal_waits():
            return False
        self._taken_ns = self._clock.monotonic_ns()
        try:
            state = self._pipeline.whole_state(self._publisher.generation)
        except Exception:  # noqa: BLE001 -- a fault of ours must not end the receiving
            self._metrics.add(table.STATE_WRITE_ERRORS)
            self._unsaved = "state could not be taken"
            _log.exception(self._unsaved)
            return False
        self._dirty = False
        with self._lock:
            self._pending = state, self._pipeline.applied_seq
        self._task.wake()
        return True

    def _due(self) -> bool:
        return self._clock.monotonic_ns() - self._taken_ns >= self._interval_ns and not self._writing

    def _journal_waits(self) -> bool:
        """Whether journal or volume fill up: a journal shrinks when both generations contain its oldest entries."""
        journal, failed = self._journal, Outcome.JOURNAL_FAILED in self._failing
        return (
            journal is not None
            and (failed or journal.size_bytes > _JOURNAL_SHARE * journal.capacity_bytes)
            and self._store.covered_seq < self._pipeline.applied_seq
            and self._clock.monotonic_ns() - self._taken_ns >= _EARLY_NS
            and not self._writing
        )

    # --- the writer's -----------------------------------------------------------------------------------------------

    def _write_pending(self) -> float:
        with self._lock:
            self._writing = self._pending is not None
            pending, self._pending = self._pending, None
        if pending is not None:
            self._unsaved = self._write(*pending)
            self._fit_journal()
            self._writing = False
            if self._unsaved:
                self._dirty = True  # a race with the worker loses nothing: it only asks for one more state
        return _PAUSE_S

    def _write(self, state: Taken, seq: int) -> str:
        """Write a generation; why not, if that failed."""
        try:
            size_bytes = self._store.write(state.pieces(), seq)
        except OSError as error:
            self._metrics.add(table.STATE_WRITE_ERRORS)
            problem = f"state not written: {error.strerror}"
            if problem != self._unsaved:  # one line per change
                _log.warning("%s", problem)
            if error.errno in _NO_ROOM:
                self._make_room(seq)
            return problem
        except Exception:  # noqa: BLE001 -- a fault of ours must not end the receiving
            self._metrics.add(table.STATE_WRITE_ERRORS)
            _log.exception("state could not be encoded")
            return "state could not be encoded"
        self._given_up_bytes = 0
        self._metrics.add(table.STATE_WRITES)
        self._metrics.set(table.STATE_BYTES, size_bytes)
        self._metrics.set(table.STATE_WRITTEN, self._clock.unix_nano() / 1e9)
        if self._journal is not None:
            self._journal.applied(self._store.covered_seq)
        return ""

    def _make_room(self, learned_seq: int) -> None:
        """Remove what is missed least, one file for each state that finds no room: what a whole state contains.

        Where there is no such file, and the journal has filled most of the volume (as earlier versions could), its
        oldest entries go that are learned: otherwise every export is refused for ever. Not before a stop, for which
        there is no next state.
        """
        journal = self._journal
        try:
            if self._store.give_up_previous():
                _log.warning("no room for a state: the older one was removed")
            elif journal is not None:
                size_bytes, unsaved = journal.give_up_oldest(self._store.saved_seq), ""
                volume_bytes = self._files.volume(self._store.directory).size_bytes
                if not size_bytes and journal.size_bytes > volume_bytes // 2 > 0 and not self._ending:
                    size_bytes = journal.give_up_oldest(learned_seq)
                    self._given_up_bytes += size_bytes
                    unsaved = ": they are learned, but in no state yet; a kill before the next one loses them"
                if size_bytes:
                    _log.warning("no room for a state: %d bytes of the journal were removed%s", size_bytes, unsaved)
        except OSError as error:
            _log.warning("no room for a state, and nothing can be removed: %s", error.strerror)
