"""The journal: what was acknowledged, on disk before it was acknowledged, until a saved state contains it.

    journal.<first number, 16 hex digits>     segments, one after the other
    record = length u32 | CRC-32 u32 | number u64 | meta length u16 | meta (MessagePack) | payload       little endian

``length`` counts what follows the CRC, and the CRC covers it. Numbers grow by one, from 1.

Guarantees (tests/collector/durable/test_journal.py, tests/torture):

* An entry that was appended is read back after the death of the process; after the death of the node too, if ``sync``
  returned (``journal.fsync: true``).
* A record that was cut or damaged is never read as one: reading a segment ends there, what is left of it is counted.
* Files never hold more than ``capacity_bytes`` and one record; when they would, ``append`` raises :class:`Full`.
* A write that failed leaves no half of a record behind that a later one could be appended to.

An append file beats SQLite in WAL mode by the factor in docs/reliability.md (tests/bench/bench_journal.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from collector.receive import Export
from collector.runtime import Files, SystemFiles, sync_directory

_HEAD = struct.Struct("<IIQH")
_PREFIX = struct.Struct("<II")
_NAME = re.compile(r"journal\.([0-9a-f]{16})")
LOCK_NAME = "journal.lock"
RECORD_BYTES_MAX = 1 << 30


class Full(OSError):
    """No room until a state was saved that contains the oldest entries."""


class Segment(NamedTuple):
    """A file of entries; ``last_seq`` may be less than ``first_seq``: then it holds none."""

    path: Path
    first_seq: int
    last_seq: int
    size_bytes: int


class _Meta(msgspec.Struct, frozen=True, array_like=True):
    peer: str
    transport: str
    spans: int


_meta_decoder = msgspec.msgpack.Decoder(_Meta)


class Journal:
    """Appended to under the queue's lock (so numbers are in the order of processing); the rest from any thread."""

    def __init__(
        self,
        directory: Path,
        *,
        capacity_bytes: int,
        segment_bytes: int,
        fsync: bool,
        files: Files | None = None,
    ) -> None:
        self._directory = directory
        self.capacity_bytes = capacity_bytes
        self._segment_bytes = segment_bytes
        self._fsync = fsync
        self._files: Files = files or SystemFiles()
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._closed_segments: list[Segment] = []
        self._path: Path | None = None
        self._descriptor = -1
        self._first_seq = 0
        self._written_bytes = 0
        self._lock_descriptor = -1
        self.last_seq = 0
        self._synced_seq = 0
        self.damaged_bytes = 0
        """Bytes at the end of segments that are no whole record: cut by a crash, or damaged."""

    # --- start and stop ---------------------------------------------------------------------------------------------

    def open(self, applied_seq: int) -> None:
        """Find what an earlier process left, and be ready to append after it.

        Raises:
            OSError: the directory cannot be used; BlockingIOError if another process uses this journal.
        """
        self._lock_descriptor = os.open(self._directory / LOCK_NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = sorted((path for path in self._directory.iterdir() if _NAME.fullmatch(path.name)), key=lambda p: p.name)
        self.last_seq = applied_seq
        for path in found:
            first_seq = int(path.name.rpartition(".")[2], 16)
            last_seq, size_bytes, good_bytes = first_seq - 1, path.stat().st_size, 0
            for number, end in _scan(path):
                last_seq, good_bytes = number, end
            self.damaged_bytes += size_bytes - good_bytes
            self._closed_segments.append(Segment(path, first_seq, last_seq, size_bytes))
            self.last_seq = max(self.last_seq, last_seq)
        self._synced_seq = self.last_seq

    def close(self) -> None:
        """Give the files back."""
        with self._lock:
            self._end_segment()
            if self._lock_descriptor >= 0:
                os.close(self._lock_descriptor)
                self._lock_descriptor = -1

    # --- in ---------------------------------------------------------------------------------------------------------

    def append(self, export: Export) -> Export:
        """Write an export down; it comes back with its number.

        Raises:
            OSError: it could not be written, and nothing of it is there.
        """
        meta = msgspec.msgpack.encode(_Meta(export.peer, export.transport, export.spans))
        with self._lock:
            seq = self.last_seq + 1
            inner = struct.pack("<QH", seq, len(meta)) + meta
            crc = zlib.crc32(export.payload, zlib.crc32(inner))
            parts = [_PREFIX.pack(len(inner) + len(export.payload), crc) + inner, export.payload]
            size_bytes = len(parts[0]) + len(parts[1])
            if self.size_bytes and self.size_bytes + size_bytes > self.capacity_bytes:
                raise Full(0, "the journal is full")
            if self._descriptor >= 0 and self._written_bytes + size_bytes > self._segment_bytes:
                self._end_segment()
            if self._descriptor < 0:
                self._begin_segment(seq)
            self._write(parts, size_bytes)
            self.last_seq = seq
        return export._replace(seq=seq)

    def sync(self, seq: int) -> None:
        """Return when the entry is on the disk; without ``fsync``, at once. One call serves all that wait."""
        if not self._fsync or seq <= self._synced_seq:
            return
        with self._sync_lock:
            if seq <= self._synced_seq:
                return
            with self._lock:
                descriptor = os.dup(self._descriptor) if self._descriptor >= 0 else -1
                last_seq = self.last_seq
            if descriptor >= 0:
                try:
                    self._files.sync(descriptor)
                finally:
                    os.close(descriptor)
            self._synced_seq = last_seq

    def _begin_segment(self, seq: int) -> None:
        path = self._directory / f"journal.{seq:016x}"
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # one that never got a whole record
            self._closed_segments = [segment for segment in self._closed_segments if segment.path != path]
        self._descriptor = self._files.open(path)
        if self._fsync:
            sync_directory(self._directory)
        self._path, self._first_seq, self._written_bytes = path, seq, 0

    def _end_segment(self) -> None:
        if self._descriptor < 0 or self._path is None:
            return
        if self._fsync and self._synced_seq < self.last_seq:
            self._files.sync(self._descriptor)
            self._synced_seq = self.last_seq
        os.close(self._descriptor)
        self._closed_segments.append(Segment(self._path, self._first_seq, self.last_seq, self._written_bytes))
        self._descriptor, self._path, self._written_bytes = -1, None, 0

    def _write(self, parts: list[bytes], size_bytes: int) -> None:
        written = 0
        try:
            written = self._files.write(self._descriptor, parts)
            while written < size_bytes:
                rest = b"".join(parts)[written:]
                count = self._files.write(self._descriptor, [rest])
                if count == 0:
                    raise OSError(0, "nothing was written")
                written += count
        except BaseException:
            self._take_back()
            raise
        self._written_bytes += size_bytes

    def _take_back(self) -> None:
        """Cut off half a record; if that fails too, nothing more goes behind it."""
        try:
            self._files.truncate(self._descriptor, self._written_bytes)
        except OSError:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            if self._path is not None:
                self._closed_segments.append(Segment(self._path, self._first_seq, self.last_seq, self._written_bytes))
            self._descriptor, self._path, self._written_bytes = -1, None, 0

    # --- out --------------------------------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments."""
        return self._written_bytes + sum(segment.size_bytes for segment in self._closed_segments)

    def entries(self, after_seq: int) -> Iterator[Export]:
        """Entries of earlier processes behind a number, in order; read one by one."""
        with self._lock:
            segments = list(self._closed_segments)
        for segment in segments:
            if segment.last_seq > after_seq:
                yield from (export for export in _read(segment.path) if export.seq > after_seq)

    def applied(self, seq: int) -> None:
        """All saved states contain the entries up to ``seq``: segments with nothing else go."""
        with self._lock:
            if self._descriptor >= 0 and self.last_seq <= seq:
                self._end_segment()
            keep = []
            for segment in self._closed_segments:
                if segment.last_seq > seq:
                    keep.append(segment)
                    continue
                try:
                    self._files.unlink(segment.path)
                except FileNotFoundError:
                    continue
                except OSError:
                    keep.append(segment)
            self._closed_segments = keep


def _scan(path: Path) -> Iterator[tuple[int, int]]:
    """(number, end) of the whole records at the begin of a segment."""
    for seq, _, _, end in _records(path):
        yield seq, end


def _read(path: Path) -> Iterator[Export]:
    for seq, meta, payload, _ in _records(path):
        yield Export(payload, meta.peer, meta.transport, meta.spans, seq=seq)


def _records(path: Path) -> Iterator[tuple[int, _Meta, bytes, int]]:
    end = 0
    before = 0
    with path.open("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, crc, seq, meta_bytes = _HEAD.unpack(head)
            rest_bytes = length - (_HEAD.size - _PREFIX.size)
            if not meta_bytes <= rest_bytes <= RECORD_BYTES_MAX or (before and seq != before + 1):
                return
            rest = file.read(rest_bytes)
            if len(rest) != rest_bytes or zlib.crc32(rest, zlib.crc32(head[_PREFIX.size :])) != crc:
                return
            try:
                meta = _meta_decoder.decode(rest[:meta_bytes])
            except (msgspec.DecodeError, UnicodeDecodeError):  # the checksum can be right all the same
                return
            end += _HEAD.size + rest_bytes
            before = seq
            yield seq, meta, rest[meta_bytes:], end


def left_behind(directory: Path) -> bool:
    """Whether an earlier process left entries."""
    return any(_NAME.fullmatch(path.name) for path in directory.iterdir())
