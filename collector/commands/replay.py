"""``tracefit replay``: recordings in, a snapshot out, by the same pipeline as live, fed in event-time order.

The clock of a replay is the telemetry's own (the newest span end), so that the same files give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import tracefit
from collector.config import Config
from collector.recordings import (
    Timed,
    by_kind,
    check_targets,
    in_batches,
    merged_with_progress,
    open_recordings,
)
from collector.runtime import EXIT_FAILED, EXIT_OK, print_stderr, print_stdout
from collector.service import TAKE_BYTES, Pipeline, make_pipeline
from exporters.snapshot_file import write_atomically

from .ask import shown_lines


def replay(
    paths: Sequence[Path],
    out: Path,
    config: Config,
    *,
    state: Path | None = None,
    stdin: BinaryIO | None = None,
) -> int:
    """Feed the files, write the snapshot to ``out``, say what was learned; failed if nothing was.

    ``paths`` are recordings in any order, directories of them, and ``-`` for ``stdin``.
    """
    check_targets(out, state, read=paths)
    pipeline = make_pipeline(config)
    timed = merged_with_progress(open_recordings(paths, print_stderr, stdin))
    newest_unix_nano, held = _learn(pipeline, in_batches(timed, TAKE_BYTES))
    if not pipeline.learned_rows:
        configs = pipeline.snapshot(newest_unix_nano, 1).configs
        doubts = sorted({doubt for each in configs for doubt in each.doubts})
        why = "; ".join(doubts) or "what is read: docs/telemetry.md"
        print_stderr(f"error: nothing was learned from {held}; {why}")
        return EXIT_FAILED
    snapshot = pipeline.snapshot(newest_unix_nano, 1)
    write_atomically(out, snapshot.to_json())
    if state is not None:
        write_atomically(state, pipeline.state())
    written = tracefit.load(out)
    for config_learned in written.configs:
        for line in shown_lines(config_learned, written.created_unix_nano):
            print_stdout(line)
    print_stdout(f"snapshot: {out}")
    return EXIT_OK


def _learn(pipeline: Pipeline, batches: Iterable[list[Timed]]) -> tuple[int, str]:
    """Learn all of it; the newest time, and what it held."""
    newest_unix_nano = spans = pages = 0
    for batch in batches:
        kinds = by_kind(batch)
        newest_unix_nano = max(newest_unix_nano, batch[-1].unix_nano)
        spans += sum([export.spans for export in kinds["exports"]])
        pages += len(kinds["pages"])
        pipeline.process(**kinds)
    pipeline.flush()
    return newest_unix_nano, f"{spans} spans" + (f" and {pages} pages" if pages else "")
