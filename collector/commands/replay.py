"""``tracefit replay``: recordings in, a snapshot out.

How far a replay as one stream has come, kept beside its snapshot now and then: the same command goes on from there.

    .OUT.stream/state.bin    everything a restart needs (collector/service/store.py), and how many turns are in it

Recordings are read again up to there, and not learned: the turns are those of before, since files, settings and version
are. A replay that takes less than ``KEEP_S`` leaves nothing on the disk, nor one of standard input or of a file that is
written to meanwhile: neither can be read again as it was.

Learn from recordings, as fast as it goes: the same pipeline as live, fed in event-time order.

The clock of a replay is the telemetry's own (the newest span end), so that the same files give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from collector.config import Config
from collector.ingest import BATCH_BYTES
from collector.recordings import (
    STDIN,
    Timed,
    TimedExport,
    TimedKv,
    TimedPage,
    in_batches,
    merged_with_progress,
    open_recordings,
)
from collector.runtime import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Clock, PrintLine, StartError
from collector.service import Pipeline, StateStore, check_learning, make_pipeline
from exporters.snapshot_file import write_atomically
from online import Bank, Snapshot

from .report import lines

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


def replay(
    paths: Sequence[Path],
    out: Path,
    config: Config,
    clock: Clock,
    *,
    say: PrintLine,
    note: PrintLine,
    state: Path | None = None,
    stdin: BinaryIO | None = None,
    workers: int | None = None,
) -> int:
    """Feed the files, write the snapshot, tell what was learned.

    Args:
        paths: recordings, in any order; directories of them; ``-`` for ``stdin``.
        out: where the snapshot goes; its directory must exist.
        config: the same as for ``run``.
        clock: for the progress only.
        say: receives the result, line by line.
        note: receives progress and warnings.
        state: where the learners' state goes, for donors and merges.
        stdin: what ``-`` stands for.
        workers: learn engine by engine in so many processes, and merge; None learns all of it as one stream.

    Returns:
        Exit code: failed if nothing was learned.
    """
    if not out.absolute().parent.is_dir():
        raise StartError(f"cannot write {out}: there is no such directory")
    if workers is not None:
        return _replay_split(paths, out, config, workers, clock, say=say, note=note, state=state, stdin=stdin)
    pipeline = make_pipeline(config)
    recordings = open_recordings(paths, note, stdin)
    progress = StreamProgress(paths, out, config, clock, note)
    try:
        progress.resume(pipeline)
        timed = merged_with_progress(recordings, clock, note)
        newest_unix_nano, held = _learn(pipeline, in_batches(timed, BATCH_BYTES), progress)
        if not pipeline.learned_rows:
            note(f"nothing was learned from {held}")
        else:
            _publish(pipeline, pipeline.snapshot(newest_unix_nano, 1), out, state, say)
        progress.remove()
    except KeyboardInterrupt:
        if not progress.is_kept:
            raise
        note("stopped; the same command goes on from here")
        return EXIT_INTERRUPTED
    finally:
        progress.release()
    return EXIT_OK if pipeline.learned_rows else EXIT_FAILED


def _learn(pipeline: Pipeline, batches: Iterable[list[Timed]], progress: StreamProgress) -> tuple[int, str]:
    """All turns but those that it knows; the newest time, and what they held."""
    newest_unix_nano = spans = pages = 0
    for turn, batch in enumerate(batches, 1):
        exports = [timed.export for timed in batch if isinstance(timed, TimedExport)]
        newest_unix_nano = max(newest_unix_nano, batch[-1].unix_nano)
        spans += sum(export.spans for export in exports)
        pages += sum(isinstance(timed, TimedPage) for timed in batch)
        if turn <= pipeline.applied_seq:
            continue
        pipeline.process_kv([timed.batch for timed in batch if isinstance(timed, TimedKv)])
        pipeline.process_pages([timed.page for timed in batch if isinstance(timed, TimedPage)])
        pipeline.process(exports)
        pipeline.applied_seq = turn
        progress.keep_when_due(pipeline)
    pipeline.flush()
    return newest_unix_nano, f"{spans} spans" + (f" and {pages} pages" if pages else "")


def _replay_split(
    paths: Sequence[Path],
    out: Path,
    config: Config,
    workers: int,
    clock: Clock,
    *,
    say: PrintLine,
    note: PrintLine,
    state: Path | None,
    stdin: BinaryIO | None,
) -> int:
    # 20 ms of imports that a replay as one stream need not pay
    from collector.fleet.bulk import (  # noqa: PLC0415
        LocalRunner,
        WorkDirectory,
        bank_of,
        find_bulk_files,
        replay_in_bulk,
    )
    from collector.fleet.pull import fleet_snapshot  # noqa: PLC0415

    check_learning(config)
    files = find_bulk_files([str(path) for path in paths])
    work = WorkDirectory(out.with_name(f".{out.name}.replay"), clock, note)
    work.take(files, config)
    runner = LocalRunner(work.path, workers, stdin)
    try:
        replayed = replay_in_bulk(files, config, runner, work.path, clock, note)
        bank = bank_of(replayed, config, note)
        if bank is None:
            note("nothing was learned")
            work.remove()
            return EXIT_FAILED
        _publish(bank, fleet_snapshot(bank), out, state, say)
        work.remove()
    except KeyboardInterrupt:
        note("stopped; the same command goes on from here")
        return EXIT_INTERRUPTED
    finally:
        runner.close()
        work.release()
    return EXIT_OK


def _publish(learned: Pipeline | Bank, snapshot: Snapshot, out: Path, state: Path | None, say: PrintLine) -> None:
    _write(out, snapshot.to_json())
    if state is not None:
        _write(state, learned.state())
    for line in lines(snapshot):
        say(line)
    say(f"snapshot: {out}")


def _write(path: Path, data: bytes) -> None:
    try:
        write_atomically(path, data)
    except OSError as error:
        raise StartError(f"cannot write {path}: {error.strerror}") from None
