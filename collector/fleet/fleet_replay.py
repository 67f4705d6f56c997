"""``tracefit fleet replay``: recordings in bulk, learned here or on a cluster, merged, and written as a pull does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from collector.config import Config
from collector.recordings import STDIN
from collector.runtime import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Clock, PrintLine, StartError
from collector.service import check_learning

from .bulk import LocalRunner, RayRunner, Runner, WorkDirectory, check_rows_place, find_bulk_files, replay_in_bulk
from .pull import PullOptions, pull_once

SMALL_BYTES: Final = 64 << 20
"""Up to here the start of more processes takes longer than what they would save."""
WORK_NAME: Final = ".replay"


class ReplayOptions(NamedTuple):
    """What a replay in bulk is asked for."""

    places: tuple[str, ...]
    out: Path
    ray: str = ""
    workers: int | None = None
    rows: str = ""


def replay_fleet(
    options: ReplayOptions, config: Config, clock: Clock, *, say: PrintLine, note: PrintLine, stdin: BinaryIO
) -> int:
    """Learn every engine of the recordings, and write the fleet's files; failed if nothing was learned."""
    check_learning(config)
    if options.rows:
        check_rows_place(options.rows)
    files = find_bulk_files(options.places)
    if options.ray and any(file.name == STDIN for file in files):
        raise StartError("standard input is on this machine alone: without --ray")
    work = WorkDirectory(options.out / WORK_NAME, clock, note)
    work.take(files, config, options.rows)
    runner: Runner | None = None
    try:
        if options.ray:
            runner = RayRunner(options.ray)
        else:
            small = sum(file.size_bytes for file in files) <= SMALL_BYTES
            workers = options.workers or (1 if small else os.cpu_count() or 1)
            runner = LocalRunner(work.path, workers, stdin)
        replayed = replay_in_bulk(files, config, runner, work.path, clock, note, options.rows)
        if not replayed.states:
            note("error: nothing was learned")
            work.remove()
            return EXIT_FAILED
        say(f"{len(files):,} files, {replayed.engines:,} engines, {replayed.rows:,} rows")
        states = tuple(str(path) for path in replayed.states)
        pull = PullOptions(states, options.out, require=0.0, of_any_time=True)
        code = pull_once(pull, config, clock, say=say, note=note)
        if code == EXIT_OK:  # else, say of a full disk, only the files are made again
            work.remove()
    except KeyboardInterrupt:
        note("stopped; the same command goes on from here")
        return EXIT_INTERRUPTED
    finally:
        if runner is not None:
            runner.close()
        work.release()
    return code
