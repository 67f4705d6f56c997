"""Learn from recordings, as fast as it goes: the same pipeline as live, fed in event-time order.

The clock of a replay is the telemetry's own (the newest span end), so that the same files give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from collector.config import Config
from collector.fleet.fleet_document import fleet_snapshot
from collector.fleet.split_replay import replay_split
from collector.recordings import Recording, Timed, TimedExport, TimedKv, TimedPage, merged, open_recordings
from collector.runtime import EXIT_FAILED, EXIT_OK, Clock, PrintLine, StartError
from collector.worker import check_learning, make_pipeline
from exporters.files import write_atomically

from .report import lines

PROGRESS_INTERVAL_NS = 1_000_000_000
KV_BATCH_BYTES = 256
"""What a batch of KV events counts for: it holds numbers only."""


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
        return _replay_split(paths, out, config, workers, say=say, note=note, state=state)
    pipeline = make_pipeline(config)
    recordings = open_recordings(paths, note, stdin)
    newest_unix_nano = spans = pages = 0
    for batch in _batches(_with_progress(recordings, clock, note), config.queue.batch_bytes):
        exports = [timed.export for timed in batch if isinstance(timed, TimedExport)]
        pipeline.process_kv([timed.batch for timed in batch if isinstance(timed, TimedKv)])
        pipeline.process_pages([timed.page for timed in batch if isinstance(timed, TimedPage)])
        pipeline.process(exports)
        newest_unix_nano = max(newest_unix_nano, batch[-1].unix_nano)
        spans += sum(export.spans for export in exports)
        pages += sum(isinstance(timed, TimedPage) for timed in batch)
    pipeline.flush()
    if not pipeline.learned_rows:
        note(f"nothing was learned from {spans} spans" + (f" and {pages} pages" if pages else ""))
        return EXIT_FAILED
    snapshot = pipeline.snapshot(newest_unix_nano, 1)
    _write(out, snapshot.to_json())
    if state is not None:
        _write(state, pipeline.state())
    for line in lines(snapshot):
        say(line)
    say(f"snapshot: {out}")
    return EXIT_OK


def _replay_split(
    paths: Sequence[Path],
    out: Path,
    config: Config,
    workers: int,
    *,
    say: PrintLine,
    note: PrintLine,
    state: Path | None,
) -> int:
    check_learning(config)
    bank = replay_split(paths, config, workers, note)
    if bank is None:
        note("nothing was learned")
        return EXIT_FAILED
    snapshot = fleet_snapshot(bank)
    _write(out, snapshot.to_json())
    if state is not None:
        _write(state, bank.state())
    for line in lines(snapshot):
        say(line)
    say(f"snapshot: {out}")
    return EXIT_OK


def _write(path: Path, data: bytes) -> None:
    try:
        write_atomically(path, data)
    except OSError as error:
        raise StartError(f"cannot write {path}: {error.strerror}") from None


def _with_progress(recordings: Sequence[Recording], clock: Clock, note: PrintLine) -> Iterator[Timed]:
    total_bytes = sum(recording.size_bytes for recording in recordings)
    start_ns = said_ns = clock.monotonic_ns()
    spans = exports = kv_batches = pages = 0
    for timed in merged(recordings):
        yield timed
        if isinstance(timed, TimedKv):
            kv_batches += 1
        elif isinstance(timed, TimedPage):
            pages += 1
        else:
            exports += 1
            spans += timed.export.spans
        now_ns = clock.monotonic_ns()
        if now_ns - said_ns >= PROGRESS_INTERVAL_NS:
            said_ns = now_ns
            position_bytes = sum(recording.position_bytes for recording in recordings)
            share = f"{position_bytes / total_bytes:4.0%}  " if total_bytes else ""  # of a pipe nobody knows
            note(f"{share}{exports} exports, {spans} spans")
    elapsed_s = (clock.monotonic_ns() - start_ns) / 1e9
    kv_text = f" and {kv_batches} batches of KV events" if kv_batches else ""
    kv_text += f" and {pages} pages" if pages else ""
    note(f"read {exports} exports, {spans} spans{kv_text} in {elapsed_s:.1f} s")


def _batches(timed: Iterator[Timed], bytes_max: int) -> Iterator[list[Timed]]:
    batch: list[Timed] = []
    size_bytes = 0
    for item in timed:
        item_bytes = len(item.export.payload) if isinstance(item, TimedExport) else KV_BATCH_BYTES
        if batch and size_bytes + item_bytes > bytes_max:
            yield batch
            batch, size_bytes = [], 0
        batch.append(item)
        size_bytes += item_bytes
    if batch:
        yield batch
