"""KV events recorded beside telemetry: what is in one folder is of the same servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from collector.decode.kv import KvBatch
from collector.recordings import Recording, TimedKv
from collector.runtime import PrintLine


def with_kv_beside(
    sources: Sequence[list[Recording]], note: PrintLine
) -> Iterator[tuple[list[Recording], list[KvBatch]]]:
    """Sources of telemetry, each with the batches of KV events from its folder, in order of time.

    ``note`` is told of events that have no telemetry beside them.
    """
    kept, kv = [], dict[Path, list[KvBatch]]()
    for recordings in sources:
        if _holds_kv(recordings[0]):
            timed = (each for recording in recordings for each in recording)
            kv.setdefault(recordings[0].path.parent, []).extend(
                each.batch for each in timed if isinstance(each, TimedKv)
            )
        else:
            kept.append(recordings)
    for folder in sorted(kv.keys() - {recordings[0].path.parent for recordings in kept}):
        note(f"{folder}: KV events without telemetry in the same folder are left out")
    for recordings in kept:
        yield recordings, sorted(kv.get(recordings[0].path.parent, ()), key=lambda batch: batch.ts_unix_ns)


def _holds_kv(recording: Recording) -> bool:
    with contextlib.closing(iter(Recording(recording.path, _say_nothing))) as timed:
        return isinstance(next(timed, None), TimedKv)


def _say_nothing(_text: str) -> None:
    """Whoever reads the recording whole says what is wrong with it."""
