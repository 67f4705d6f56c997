"""Recordings cut into shards by engine, to be read by one worker each.

Files and objects to replay: a path, a directory, ``s3://bucket/prefix``; whatever fsspec knows.

    NAME           a file, or all below a directory or a prefix
    NAME/*.pb.gz   those that match, in a store

What is read from a store is read again where that fails, and in the end the replay fails: half of an object taken for
the whole would be a result that nobody can tell from a right one.

The first half of a replay in bulk: files are read once and cut by engine into shards, without decoding a step.

Files of one part are merged by event time, ``FILES_AT_ONCE`` at a time. The time of an entry is the newest span end of
its engine in its file so far, as in a recording of that engine alone: another one may be far ahead in the same files,
and would shift what lies on both sides of a cut. Which files are a part, what goes into which bucket and where a shard
ends depends on the recordings alone, so that shards are the same whoever makes them, however often.

Shards: what the engines of one bucket said in one part of the recordings, as bytes that another process reads.

    u32 size │ header (msgpack) │ entry │ entry │ …        entry = time, kind, label, spans, size │ payload

Entries of one engine stand together in event-time order, as runs; a reader takes the runs it wants, from a file that is
mapped or from memory that is shared, and holds one entry at a time. The shared shard holds what may belong to any
engine: API spans, found by their ids, and KV events. Shards are written and read by one version of tracefit.
"""

from __future__ import annotations

import heapq
import io
import os
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, BinaryIO, Final, NamedTuple, cast

import msgspec

from collector.decode import PartKind, parts_by_emitter
from collector.decode.kv import KvBatch
from collector.decode.pages import ScrapedPage
from collector.fleet.state_fetch import open_store
from collector.ingest import Export, newest_end_unix_nano
from collector.recordings import (
    FILE_TRANSPORT,
    STDIN,
    Recording,
    Timed,
    TimedExport,
    TimedKv,
    TimedPage,
    recording_files,
    source_of,
)
from collector.runtime import StartError

READ_BYTES: Final = 4 << 20
TRIES: Final = 5
PAUSE_S = 0.5
"""Before the second try; twice as long before each further one."""


class BulkFile(NamedTuple):
    """One file, and how large it is; what it is a recording of; ``changed`` is another one when its content is."""

    name: str
    size_bytes: int
    source: str
    changed: str = ""


def find_bulk_files(places: Sequence[str]) -> list[BulkFile]:
    """Every file, by source and name; StartError for a place that cannot be looked at, or has none.

    A million of them take some 350 MB: a source is one text for all its files.
    """
    files: dict[str, BulkFile] = {}
    for place in places:
        for file in _objects(place) if "://" in place else _files(place):
            files.setdefault(file.name, file)
    return sorted(files.values(), key=lambda file: (file.source, file.name))


def open_bulk_file(file: BulkFile, warn: Callable[[str], None], stdin: BinaryIO | None = None) -> Recording:
    """The file as a recording; a name that is no text is told in text."""
    source = as_text(file.source)

    def tell(text: str) -> None:
        warn(as_text(text))

    if file.name == STDIN:
        return Recording(file.name, tell, source, stdin)
    if "://" not in file.name:
        return Recording(file.name, tell, source)
    storage, path = open_store(file.name)
    stream = io.BufferedReader(_Object(file.name, lambda: storage.open(path, "rb", block_size=READ_BYTES)), READ_BYTES)
    return Recording(file.name, tell, source, cast("BinaryIO", stream), file.size_bytes)


def as_text(name: str) -> str:
    """A file's name may be any bytes."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _files(place: str) -> Iterator[BulkFile]:
    for name in recording_files([place]):
        if name == STDIN:
            yield BulkFile(name, 0, name)
            continue
        try:
            status = os.stat(name)  # noqa: PTH116 -- there may be a million
        except OSError as error:
            raise StartError(f"cannot read {name}: {error.strerror}") from None
        yield BulkFile(name, status.st_size, sys.intern(source_of(name)), str(status.st_mtime_ns))


def _objects(url: str) -> Iterator[BulkFile]:
    storage, path = open_store(url)
    scheme = url.partition("://")[0]
    try:
        found = storage.glob(path, detail=True) if "*" in path else storage.find(path, detail=True)
    except Exception as error:  # noqa: BLE001 -- every store has errors of its own
        raise StartError(f"cannot read {url}: {type(error).__name__}: {error}") from None
    above = path.rstrip("/") + "/"
    objects = {
        name: about
        for name, about in found.items()
        if about.get("type") == "file" and not _is_hidden(name.removeprefix(above))
    }
    if not objects:
        raise StartError(f"cannot read {url}: there is no object in it")
    for name, about in objects.items():
        shown = f"{scheme}://{name.lstrip('/')}" if scheme != "file" else name
        changed = str(about.get("ETag") or about.get("etag") or about.get("LastModified") or about.get("mtime") or "")
        yield BulkFile(shown, int(about.get("size") or 0), sys.intern(source_of(shown)), changed)


def _is_hidden(below: str) -> bool:
    return below.startswith(".") or "/." in below


class StoreError(Exception):
    """An object could not be read to its end, however often that was tried."""


class _Object(io.RawIOBase):
    """An object read in order; where a read fails it is opened again and goes on from there."""

    def __init__(self, name: str, open_object: Callable[[], Any]) -> None:
        self._name = name
        self._open = open_object
        self._object: Any = None
        self._at = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        if self._object is not None:
            self._object.close()
        super().close()

    def _read(self, size: int) -> bytes:
        for left in reversed(range(TRIES)):
            try:
                if self._object is None:
                    self._object = self._open()
                    self._object.seek(self._at)
                return cast("bytes", self._object.read(size))
            except Exception as error:  # noqa: BLE001 -- every store has errors of its own
                self._object = None
                if not left:
                    raise StoreError(f"cannot read {self._name}: {type(error).__name__}: {error}") from None
                time.sleep(PAUSE_S * 2 ** (TRIES - 1 - left))
        raise AssertionError


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


_ENTRY: Final = struct.Struct("<QBIII")
_HEADER: Final = struct.Struct("<I")
_EXPORT, _KV, _PAGE = range(3)
_KV_DECODER: Final = msgspec.msgpack.Decoder(KvBatch)
_PAGE_DECODER: Final = msgspec.msgpack.Decoder(ScrapedPage)

Shard = Callable[[], memoryview]
"""Opens a shard; what it gives is let go of as soon as nobody reads it."""


class EngineKey(NamedTuple):
    """The recording it is in, and its name there."""

    recording: str
    instance: str


class Run(msgspec.Struct, array_like=True, frozen=True):
    """Entries of one engine in order; ``parents``: ids of the API spans its requests wait for, eight bytes each."""

    recording: str
    instance: str
    first_unix_nano: int
    start: int
    stop: int
    parents: bytes = b""

    @property
    def key(self) -> EngineKey:
        """Whose entries they are."""
        return EngineKey(self.recording, self.instance)


class Header(msgspec.Struct, array_like=True, frozen=True):
    """Offsets count from the first entry. ``ids`` are of API spans, and ``places`` their entries; eight bytes each."""

    labels: list[str]
    runs: list[Run]
    ids: bytes = b""
    places: bytes = b""
    for_all: list[int] = []
    """Places of entries that every engine gets."""
    turns: list[tuple[int, int]] = []
    """Where the order of shared entries begins anew, and the time of the first one there."""


_HEADER_DECODER: Final = msgspec.msgpack.Decoder(Header)


class _Entry(NamedTuple):
    """Encoded; in the order of its time, then of the files."""

    unix_nano: int
    file: int
    head: bytes
    payload: bytes
    ids: bytes = b""
    for_all: bool = False


class ShardWriter:
    """Gathers the entries of one shard."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._labels: dict[str, int] = {}
        self._entries: dict[EngineKey, list[_Entry]] = {}
        self._shared: list[_Entry] = []
        self._runs: list[Run] = []
        self._written: list[bytes] = []
        self._offset = 0
        self._ids: list[bytes] = []
        self._places: list[bytes] = []
        self._for_all: list[int] = []
        self._turns: list[tuple[int, int]] = []

    def add(self, key: EngineKey, file: int, timed: Timed, parents: bytes = b"") -> None:
        """What an engine said, in the order of each file."""
        self._entries.setdefault(key, []).append(self._encoded(file, timed, parents))

    def add_shared(self, file: int, timed: Timed, ids: bytes = b"", *, for_all: bool = False) -> None:
        """What belongs to whoever waits for these ids, or to all."""
        if ids or for_all:
            self._shared.append(self._encoded(file, timed, ids, for_all=for_all))

    def end_runs(self) -> None:
        """What comes next may be earlier than what was added so far."""
        for key, entries in self._entries.items():
            start = self._offset
            first_unix_nano = self._write(entries, lambda _: None)
            parents = b"".join(entry.ids for entry in entries)
            self._runs.append(Run(*key, first_unix_nano, start, self._offset, parents))
        self._entries = {}
        if self._shared:
            start = self._offset
            self._turns.append((start, self._write(self._shared, self._find_shared)))
            self._shared = []

    def _write(self, entries: list[_Entry], at_entry: Callable[[_Entry], None]) -> int:
        """Write them in their order; the time of the first."""
        entries.sort(key=lambda entry: (entry.unix_nano, entry.file))
        for entry in entries:
            at_entry(entry)
            self._written += (entry.head, entry.payload)
            self._offset += len(entry.head) + len(entry.payload)
        return entries[0].unix_nano

    def _find_shared(self, entry: _Entry) -> None:
        if entry.for_all:
            self._for_all.append(self._offset)
        self._ids.append(entry.ids)
        self._places.append(self._offset.to_bytes(8, "little") * (len(entry.ids) // 8))

    def finish(self) -> list[bytes]:
        """Everything as one shard, in pieces, since a copy of all would be as large; none if it is nothing."""
        self.end_runs()
        if not self._written:
            return []
        header = Header(
            [*self._labels], self._runs, b"".join(self._ids), b"".join(self._places), self._for_all, self._turns
        )
        head = msgspec.msgpack.encode(header)
        return [_HEADER.pack(len(head)), head, *self._written]

    def _encoded(self, file: int, timed: Timed, ids: bytes, *, for_all: bool = False) -> _Entry:
        spans = 0
        if isinstance(timed, TimedExport):
            kind, payload, spans = _EXPORT, timed.export.payload, timed.export.spans
        elif isinstance(timed, TimedKv):
            kind, payload = _KV, msgspec.msgpack.encode(timed.batch)
        else:
            kind, payload = _PAGE, msgspec.msgpack.encode(timed.page)
        label = self._labels.setdefault(timed.label, len(self._labels))
        head = _ENTRY.pack(timed.unix_nano, kind, label, spans, len(payload))
        self.size_bytes += len(head) + len(payload)
        return _Entry(timed.unix_nano, file, head, payload, ids, for_all)


def read_header(shard: memoryview) -> Header:
    """What is in a shard."""
    (size,) = _HEADER.unpack_from(shard)
    return _HEADER_DECODER.decode(shard[_HEADER.size : _HEADER.size + size])


def read_run(shard: Shard, run: Run) -> Iterator[Timed]:
    """The entries of a run; the shard is opened by the first of them."""
    yield from _read(shard, lambda labels, body: _entries_between(labels, body, run.start, run.stop))


def read_places(shard: Shard, places: Sequence[int]) -> Iterator[Timed]:
    """The entries at these places."""
    yield from _read(shard, lambda labels, body: (_entry_at(labels, body, place)[0] for place in places))


def _read(shard: Shard, read: Callable[[list[str], memoryview], Iterator[Timed]]) -> Iterator[Timed]:
    view = shard()
    (size,) = _HEADER.unpack_from(view)
    labels = read_header(view).labels
    yield from read(labels, view[_HEADER.size + size :])


def _entries_between(labels: list[str], body: memoryview, at: int, stop: int) -> Iterator[Timed]:
    while at < stop:
        timed, at = _entry_at(labels, body, at)
        yield timed


def _entry_at(labels: list[str], body: memoryview, at: int) -> tuple[Timed, int]:
    unix_nano, kind, label, spans, size = _ENTRY.unpack_from(body, at)
    at += _ENTRY.size
    payload = body[at : at + size]
    timed: Timed
    if kind == _EXPORT:
        name = labels[label]
        timed = TimedExport(unix_nano, Export(bytes(payload), name, FILE_TRANSPORT, spans, name))
    elif kind == _KV:
        timed = TimedKv(unix_nano, _KV_DECODER.decode(payload))
    else:
        timed = TimedPage(unix_nano, _PAGE_DECODER.decode(payload))
    return timed, at + size


def merge_when_due(streams: Iterable[tuple[int, Iterator[Timed]]]) -> Iterator[Timed]:
    """Streams in event-time order as one; each with the time of its first entry, and not looked at before that."""
    heap: list[tuple[int, str, int, Timed | None, Iterator[Timed]]] = [
        (first_unix_nano, "", number, None, stream) for number, (first_unix_nano, stream) in enumerate(streams)
    ]
    heapq.heapify(heap)
    while heap:
        _, _, number, timed, stream = heap[0]
        if timed is not None:
            yield timed
        following = next(stream, None)
        if following is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (following.unix_nano, following.label, number, following, stream))
