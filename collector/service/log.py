"""The log: raw exports in segments on disk, until a checkpoint has learned them.

    log.<first number, 16 hex digits>    a segment: entries one after the other
    log.head                             number of the newest entry, so that a loss at the end is counted as well,
                                         and of the last one that was passed on to a backend

    entry = mark u32 | length u32 | CRC-32 u32 | MessagePack of number, peer, spans, arrival and payload

Little endian. ``length`` counts what follows the checksum, and the checksum covers it. Numbers grow by one. Whoever
changes what an entry has, changes the last byte of the mark: a start finds no entry of another format, and counts them
as lost.

An appended entry is read again after the death of the process. The kernel writes it to the disk when it likes, so that
the death of the node may cost the newest. A damaged entry is never read as one, and costs no other: the next one is
looked for behind it, by its mark. A write that failed leaves no half of an entry behind. Segments never hold more
than ``capacity_bytes`` and one entry; when they would, :class:`LogFullError` is raised. Once the checkpoint has learned
all of a segment, that segment is deleted.

``append`` belongs to whoever fills the queue, the rest to the worker; one process at a time (see :mod:`.checkpoint`).
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from collector.decode import Export
from collector.runtime import SystemFiles

_HEAD_NAME: Final = "log.head"
_SEGMENTS: Final = 16
"""Of a full log: what is freed at once is a sixteenth of it."""
_SEGMENT_BYTES_MAX: Final = 4 << 20
"""A segment is read as one."""
_MISSES_MAX: Final = 1000
"""Wrong checksums in one segment, behind which no more entries are looked for: each costs the time of one."""
_AHEAD_MAX: Final = 1 << 16
"""How many numbers further on the next whole entry may be."""
_MARK: Final = b"\xf1tf\x03"
_HEAD = struct.Struct("<4sII")
_TOLD = struct.Struct("<QQI")
"""What ``log.head`` says: both numbers and their checksum."""
_SEGMENT_NAME = re.compile(r"log\.(0[0-9a-f]{15})")


class LogFullError(OSError):
    """No room until a checkpoint was written."""


class _Segment(NamedTuple):
    """A file of entries; one without any has a ``last`` below its ``first``."""

    path: Path
    first: int
    last: int
    size_bytes: int


_decoder = msgspec.msgpack.Decoder(tuple[int, str, int, int, bytes])


def is_segment(path: Path) -> bool:
    """Whether it is a file with the name of a segment; of another kind than a file nobody made it for a log."""
    return _SEGMENT_NAME.fullmatch(path.name) is not None and path.is_file()


class Log:
    """``open`` once; then ``append``, ``entries`` and ``free``, from any thread."""

    def __init__(self, directory: Path, capacity_bytes: int, files: SystemFiles) -> None:
        self.capacity_bytes = capacity_bytes
        self.newest = 0
        """Number of the newest entry."""
        self.forwarded_seq = 0
        """Number of the last entry that a backend need not be sent any more."""
        self.lost_entries = 0
        """Numbers that no whole entry has, of those that no checkpoint has learned."""
        self._directory = directory
        self._files = files
        self._lock = threading.Lock()
        self._segments: list[_Segment] = []
        self._descriptor = self._head_descriptor = -1
        """Of the last segment while it is written to, and of the file with the newest number."""

    def open(self, read_from: int, newest: int) -> None:
        """Find what an earlier process left, and be ready to append behind it.

        Args:
            read_from: a checkpoint has learned all entries with smaller numbers.
            newest: number of the newest entry that the checkpoint knows of.

        Raises:
            OSError: the directory cannot be used.
        """
        path = self._directory / _HEAD_NAME
        self._head_descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        told, self.forwarded_seq = self._read_head()
        expected = max(read_from, 1)
        for path in sorted(path for path in self._directory.iterdir() if is_segment(path)):
            first = int(path.name.rpartition(".")[2], 16)
            last = first - 1
            for export in _entries_of(path, first):
                last = export.seq
                self.lost_entries += max(0, last - expected)
                expected = max(expected, last + 1)
            self._segments.append(_Segment(path, first, last, path.stat().st_size))
        self.newest = max(newest, told, *(segment.last for segment in self._segments), 0)
        self.lost_entries += max(0, self.newest + 1 - expected)

    def _read_head(self) -> tuple[int, int]:
        told = os.pread(self._head_descriptor, _TOLD.size, 0)
        if len(told) == _TOLD.size:
            newest, forwarded_seq, checksum = _TOLD.unpack(told)
            if checksum == zlib.crc32(told[:-4]):
                return newest, forwarded_seq
        return 0, 0

    def _write_head(self) -> None:
        numbers = struct.pack("<QQ", self.newest, self.forwarded_seq)
        with contextlib.suppress(OSError):  # a loss at the end would be told too small, an entry be passed on twice
            os.pwrite(self._head_descriptor, numbers + struct.pack("<I", zlib.crc32(numbers)), 0)

    def close(self) -> None:
        """Give the files back."""
        with self._lock:
            self._end_segment()
            if self._head_descriptor >= 0:
                os.close(self._head_descriptor)
                self._head_descriptor = -1

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size_bytes for segment in self._segments)

    # --- in ---------------------------------------------------------------------------------------------------------

    def append(self, export: Export) -> Export:
        """Write an export down; it comes back with its number.

        Raises:
            OSError: it could not be written, and nothing of it is there; LogFullError if there is no room.
        """
        with self._lock:
            number = self.newest + 1
            told = number, export.peer, export.spans, export.arrived_unix_ns, export.payload
            body = msgspec.msgpack.encode(told)
            entry = _HEAD.pack(_MARK, len(body), zlib.crc32(body)) + body
            if self.size_bytes and self.size_bytes + len(entry) > self.capacity_bytes:
                raise LogFullError(0, "the log is full")
            self._write(entry, number)
            self.newest = number
            self._write_head()
        return export._replace(seq=number)

    def _write(self, entry: bytes, number: int) -> None:
        most_bytes = min(self.capacity_bytes // _SEGMENTS, _SEGMENT_BYTES_MAX)
        if self._descriptor >= 0 and self._segments[-1].size_bytes + len(entry) > most_bytes:
            self._end_segment()
        if self._descriptor < 0:
            self._begin_segment(number)
        segment = self._segments[-1]
        try:
            self._files.write_all(self._descriptor, entry)
        except BaseException:
            self._take_back(segment)
            raise
        self._segments[-1] = segment._replace(last=number, size_bytes=segment.size_bytes + len(entry))

    def _begin_segment(self, number: int) -> None:
        path = self._directory / f"log.{number:016x}"
        if self._segments and self._segments[-1].path == path:  # it never got a whole entry
            self._segments.pop()
        path.unlink(missing_ok=True)
        self._descriptor = self._files.open(path)
        self._segments.append(_Segment(path, number, number - 1, 0))

    def _end_segment(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _take_back(self, segment: _Segment) -> None:
        """Cut off half an entry; if that fails too, nothing more goes behind it."""
        try:
            self._files.truncate(self._descriptor, segment.size_bytes)
        except OSError:
            self._end_segment()

    # --- out --------------------------------------------------------------------------------------------------------

    def entries(self, first: int) -> Iterator[Export]:
        """The whole entries from a number to the newest that there is now, in order; read one by one."""
        with self._lock:
            segments, newest = [each for each in self._segments if each.last >= first], self.newest
        every = (one for each in segments for one in _entries_of(each.path, each.first))
        return (one for one in every if first <= one.seq <= newest)

    def mark_forwarded(self, number: int) -> None:
        """Keep how far a backend has been sent what is here."""
        self.forwarded_seq = number
        self._write_head()

    def free(self, read_from: int) -> None:
        """A checkpoint has learned all entries with smaller numbers: segments with nothing else go."""
        with self._lock:
            while self._segments and self._segments[0].last < read_from:
                if len(self._segments) == 1:
                    self._end_segment()
                try:
                    self._segments[0].path.unlink()
                except FileNotFoundError:
                    pass
                except OSError:
                    break
                del self._segments[0]


# --- bytes ----------------------------------------------------------------------------------------------------------


def _entries_of(path: Path, first: int) -> Iterator[Export]:
    """The whole entries of a segment in order; numbers are ``first`` and larger."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:  # freed meanwhile: a checkpoint has learned it
        return
    at, expected, misses = data.find(_MARK), first, 0
    while at >= 0 and at + _HEAD.size <= len(data) and misses < _MISSES_MAX:
        _, length, checksum = _HEAD.unpack_from(data, at)
        begin = at + _HEAD.size
        body = data[begin : begin + length]
        if len(body) == length and zlib.crc32(body) == checksum:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # a sender's bytes, behind damage
                number, peer, spans, arrived_unix_ns, payload = _decoder.decode(body)
                if expected <= number < expected + _AHEAD_MAX:
                    yield Export(payload, peer, spans, "", number, arrived_unix_ns)
                    expected, at = number + 1, data.find(_MARK, begin + length)
                    continue
        misses += 1
        at = data.find(_MARK, at + 1)
