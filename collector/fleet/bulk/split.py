"""The first half of a replay in bulk: files are read once and cut by engine into shards, without decoding a step.

Files of one part are merged by event time, ``FILES_AT_ONCE`` at a time. The time of an entry is the newest span end of
its engine in its file so far, as in a recording of that engine alone: another one may be far ahead in the same files,
and would shift what lies on both sides of a cut. Which files are a part, what goes into which bucket and where a shard
ends depends on the recordings alone, so that shards are the same whoever makes them, however often.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import BinaryIO, Final, NamedTuple

from collector.decode import PartKind, parts_by_emitter
from collector.receive import Export, newest_end_unix_nano
from collector.recordings import Recording, Timed, TimedExport, TimedKv, TimedPage

from .bulk_files import BulkFile, open_bulk_file
from .shards import EngineKey, ShardWriter

BUCKETS: Final = 64
"""Engines are learned bucket by bucket; more processes than that have nothing to do."""
SHARED: Final = BUCKETS
SHARD_BYTES: Final = 96 << 20
"""What is gathered before shards are made: the memory of whoever splits is twice that, and itself."""
PART_BYTES, PART_FILES, FILES_AT_ONCE = 256 << 20, 4096, 64
SMALL_PART_BYTES, PARTS = 32 << 20, 32
"""Parts are smaller where there would be few of them: then none is split while nothing else is left to do."""


class Part(NamedTuple):
    """Files that one task reads."""

    number: int
    files: tuple[BulkFile, ...]

    @property
    def size_bytes(self) -> int:
        """As they lie there, compressed or not."""
        return sum(file.size_bytes for file in self.files)


def parts_of(files: Sequence[BulkFile]) -> list[Part]:
    """Files in their order, as many in each part as are worth a task."""
    worth_bytes = min(max(sum(file.size_bytes for file in files) // PARTS, SMALL_PART_BYTES), PART_BYTES)
    groups: list[list[BulkFile]] = []
    size_bytes = 0
    for file in files:
        if not groups or size_bytes + file.size_bytes > worth_bytes or len(groups[-1]) == PART_FILES:
            groups.append([])
            size_bytes = 0
        groups[-1].append(file)
        size_bytes += file.size_bytes
    return [Part(number, tuple(group)) for number, group in enumerate(groups)]


def bucket_of(instance: str) -> int:
    """By the engine's name alone, so that two recordings of one engine meet."""
    return zlib.crc32(instance.encode("utf-8", "surrogateescape")) % BUCKETS


def split(part: Part, warn: Callable[[str], None], stdin: BinaryIO | None = None) -> Iterator[tuple[int, list[bytes]]]:
    """Bucket and shard in pieces; the bucket ``SHARED`` is needed by all. StoreError if a file cannot be read."""
    splitter = _Splitter()
    for first in range(0, len(part.files), FILES_AT_ONCE):
        recordings = [open_bulk_file(file, warn, stdin) for file in part.files[first : first + FILES_AT_ONCE]]
        for number, timed in _merged(recordings):
            splitter.add(first + number, timed)
            if splitter.size_bytes >= SHARD_BYTES:
                yield from splitter.finish()
        splitter.end_runs()
    yield from splitter.finish()


def _merged(recordings: Sequence[Recording]) -> Iterator[tuple[int, Timed]]:
    """In event-time order, each entry with the number of its file."""
    streams = [zip(repeat(number), recording) for number, recording in enumerate(recordings)]
    return heapq.merge(*streams, key=lambda each: (each[1].unix_nano, each[1].label))


class _Splitter:
    """What is gathered of each bucket."""

    def __init__(self) -> None:
        self._writers: dict[int, ShardWriter] = {}
        self._newest_unix_nano: dict[tuple[int, str], int] = {}
        """Of each engine, by file."""

    @property
    def size_bytes(self) -> int:
        """Of all that is gathered."""
        return sum(writer.size_bytes for writer in self._writers.values())

    def add(self, file: int, timed: Timed) -> None:
        """An entry of a file."""
        if isinstance(timed, TimedKv):
            self._writer(SHARED).add_shared(file, timed, for_all=True)
        elif isinstance(timed, TimedPage):
            instance = timed.page.instance
            unix_nano = self._time(file, instance, timed.page.unix_ns)
            writer = self._writer(bucket_of(instance))
            writer.add(EngineKey(timed.label, instance), file, timed._replace(unix_nano=unix_nano))
        else:
            self._add_export(file, timed)

    def _add_export(self, file: int, timed: TimedExport) -> None:
        label = timed.label
        try:
            parts = parts_by_emitter(timed.export.payload, label)
        except ValueError:
            return  # its decoder could not read it either
        for part in parts:
            self._time(file, part.instance, newest_end_unix_nano(part.payload))
        for part in parts:
            unix_nano = self._newest_unix_nano[file, part.instance]
            own = TimedExport(unix_nano, Export(part.payload, label, timed.export.transport, 0, label))
            if part.kind is PartKind.OF_EMITTER:
                self._writer(bucket_of(part.instance)).add(EngineKey(label, part.instance), file, own, part.ids)
            else:
                self._writer(SHARED).add_shared(file, own, part.ids, for_all=part.kind is PartKind.OF_KV)

    def _time(self, file: int, instance: str, unix_nano: int) -> int:
        newest_unix_nano = max(self._newest_unix_nano.get((file, instance), 0), unix_nano)
        self._newest_unix_nano[file, instance] = newest_unix_nano
        return newest_unix_nano

    def end_runs(self) -> None:
        """What comes next is of other files."""
        self._newest_unix_nano.clear()
        for writer in self._writers.values():
            writer.end_runs()

    def finish(self) -> Iterator[tuple[int, list[bytes]]]:
        """Everything as shards."""
        for bucket in sorted(self._writers):
            shard = self._writers.pop(bucket).finish()
            if shard:
                yield bucket, shard

    def _writer(self, bucket: int) -> ShardWriter:
        writer = self._writers.get(bucket)
        if writer is None:
            writer = self._writers[bucket] = ShardWriter()
        return writer
