"""The first half of a replay in bulk: files are read once and cut by engine into shards, without decoding a step.

Files of one part are merged by event time, ``FILES_AT_ONCE`` at a time. Which files are a part, what goes into which
bucket and where a shard ends depends on the recordings alone, so that shards are the same whoever makes them, however
often.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Final, NamedTuple

from collector.decode import PartKind, parts_by_emitter
from collector.receive import Export
from collector.recordings import Timed, TimedExport, TimedKv, TimedPage, merged

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
    writers: dict[int, ShardWriter] = {}
    for first in range(0, len(part.files), FILES_AT_ONCE):
        recordings = [open_bulk_file(file, warn, stdin) for file in part.files[first : first + FILES_AT_ONCE]]
        for timed in merged(recordings):
            _dispatch(timed, writers)
            if sum(writer.size_bytes for writer in writers.values()) >= SHARD_BYTES:
                yield from _finished(writers)
        for writer in writers.values():
            writer.end_runs()
    yield from _finished(writers)


def _finished(writers: dict[int, ShardWriter]) -> Iterator[tuple[int, list[bytes]]]:
    for bucket in sorted(writers):
        shard = writers.pop(bucket).finish()
        if shard:
            yield bucket, shard


def _dispatch(timed: Timed, writers: dict[int, ShardWriter]) -> None:
    if isinstance(timed, TimedKv):
        _writer(writers, SHARED).add_shared(timed, for_all=True)
    elif isinstance(timed, TimedPage):
        instance = timed.page.instance
        _writer(writers, bucket_of(instance)).add(EngineKey(timed.label, instance), timed)
    else:
        _dispatch_export(timed, writers)


def _dispatch_export(timed: TimedExport, writers: dict[int, ShardWriter]) -> None:
    try:
        parts = parts_by_emitter(timed.export.payload, timed.label)
    except ValueError:
        return  # its decoder could not read it either
    for part in parts:
        own = TimedExport(timed.unix_nano, Export(part.payload, timed.label, timed.export.transport, 0, timed.label))
        if part.kind is PartKind.OF_EMITTER:
            key = EngineKey(timed.label, part.instance)
            _writer(writers, bucket_of(part.instance)).add(key, own, part.ids)
        else:
            _writer(writers, SHARED).add_shared(own, part.ids, for_all=part.kind is PartKind.OF_KV)


def _writer(writers: dict[int, ShardWriter], bucket: int) -> ShardWriter:
    writer = writers.get(bucket)
    if writer is None:
        writer = writers[bucket] = ShardWriter()
    return writer
