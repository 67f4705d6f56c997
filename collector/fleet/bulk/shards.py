"""Shards: what the engines of one bucket said in one part of the recordings, as bytes that another process reads.

    u32 size │ header (msgpack) │ entry │ entry │ …        entry = time, kind, label, spans, size │ payload

Entries of one engine stand together in event-time order, as runs; a reader takes the runs it wants, from a file that is
mapped or from memory that is shared, and holds one entry at a time. The shared shard holds what may belong to any
engine: API spans, found by their ids, and KV events. Shards are written and read by one version of tracefit.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from collector.decode.kv import KvBatch
from collector.decode.pages import ScrapedPage
from collector.receive import Export
from collector.recordings import FILE_TRANSPORT, Timed, TimedExport, TimedKv, TimedPage

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
