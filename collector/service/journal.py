"""The journal: what was acknowledged, in segments on disk, as far as the volume has room.

Whether the journal fits on its volume, beside three states: two generations, and the next one while it is written.

A journal that fills its volume keeps out the state that would empty it, and no restart changes that. So the journal
gets what the volume has beyond three states, at most ``journal.capacity_mib``. A volume that is too small even for the
states is shared equally: a quarter is the journal's.

One entry of the journal as bytes, and the whole entries of a segment, also of a damaged one.

    record = length u32 | CRC-32 u32 | number u64 | meta length u16 | meta (MessagePack) | payload       little endian

``length`` counts what follows the CRC, and the CRC covers it. Numbers grow by one along a segment.

Behind a record that is damaged, the next one is looked for: where the damaged one says that it ends, and else byte by
byte, by the high bytes of the numbers that may follow. A record counts as found if its lengths fit, its number follows
and its checksum is right, so that damage costs the records that it lies in and no other. What the search may read is
bounded: bytes made to look like heads cost time, and never more than ``SEARCH_BYTES_MAX``.

The journal: what was acknowledged, on disk before it was acknowledged, until a saved state contains it.

    journal.<first number, 16 hex digits>     segments of records, one after the other

Guarantees (tests/collector/service/test_journal.py, tests/torture):

* An entry that was appended is read back after the death of the process; after the death of the node too, if ``sync``
  returned (``journal.fsync: true``).
* A record that was cut or damaged is never read as one; it is counted, and the others of its segment are read.
* Files never hold more than ``capacity_bytes`` and one record; when they would, ``append`` raises :class:`Full`.
* A write that failed leaves no half of a record behind that a later one could be appended to.

One process at a time: see collector/service/store.py.
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
from typing import BinaryIO, Final, NamedTuple

import msgspec

from collector.config import Config
from collector.ingest import Export
from collector.runtime import Files, SystemFiles, sync_directory

from .store import STATE_FILES

STATES: Final = 3
ENGINE_STATE_BYTES: Final = 1 << 20
"""Of one engine in a state: up to 4,000 steps that wait, with 270 bytes each (docs/reliability.md)."""
_MIB: Final = 1 << 20


def fitted_capacity(config: Config, files: Files) -> tuple[int, str]:
    """Bytes that the journal may have, and a sentence if they are fewer than configured.

    As configured where the volume says nothing about its size.
    """
    directory, wanted_bytes = Path(config.snapshot.directory), config.journal.capacity_mib * _MIB
    state_bytes, held_bytes = config.join.engines_max * ENGINE_STATE_BYTES, 0
    try:
        volume = files.volume(directory)
        for path in directory.iterdir():
            if path.name in STATE_FILES:
                state_bytes = max(state_bytes, path.stat().st_size)
            if path.name in STATE_FILES or is_segment(path.name):
                held_bytes += path.stat().st_size
    except OSError:
        return wanted_bytes, ""
    room_bytes = volume.free_bytes + held_bytes
    fitting_bytes = max(room_bytes - STATES * state_bytes, room_bytes // (STATES + 1))
    if not volume.size_bytes or fitting_bytes >= wanted_bytes:
        return wanted_bytes, ""
    fitting_mib, room_mib, states_mib = (each / _MIB for each in (fitting_bytes, room_bytes, STATES * state_bytes))
    return fitting_bytes, (
        f"the journal has {fitting_mib:.3g} MiB instead of {config.journal.capacity_mib} (journal.capacity_mib): "
        f"the volume of {directory} has room for {room_mib:.3g} MiB, of which three states may need {states_mib:.3g}"
    )


SEQ_MAX: Final = 1 << 64
RECORD_BYTES_MAX: Final = 1 << 30
SEARCH_BYTES_MAX: Final = 1 << 30
"""Bytes of would-be records whose checksum is computed in one search."""
SKIPPED_MAX: Final = 1 << 16
"""How many numbers further on the next record may be."""
_CHUNK_BYTES: Final = 1 << 20

_HEAD = struct.Struct("<IIQH")
_PREFIX = struct.Struct("<II")
_SEQ_AT: Final = _PREFIX.size
_LOW_BYTES: Final = 2
"""Of a number, the bytes in which ``SKIPPED_MAX`` neighbours differ; the other six are looked for."""


class Record(NamedTuple):
    """A whole entry, and where it lies in its file."""

    export: Export
    begin: int
    end: int


class _Meta(msgspec.Struct, frozen=True, array_like=True):
    peer: str
    transport: str
    spans: int
    arrived_unix_ns: int = 0


_meta_decoder = msgspec.msgpack.Decoder(_Meta)


def record_parts(export: Export, seq: int) -> list[bytes]:
    """A record in two buffers, so that the payload is not copied."""
    said = _Meta(export.peer, export.transport, export.spans, export.arrived_unix_ns)
    meta = msgspec.msgpack.encode(said)
    inner = struct.pack("<QH", seq, len(meta)) + meta
    crc = zlib.crc32(export.payload, zlib.crc32(inner))
    return [_PREFIX.pack(len(inner) + len(export.payload), crc) + inner, export.payload]


def read_records(path: Path, first_seq: int, end_seq: int = SEQ_MAX) -> Iterator[Record]:
    """Whole records of a segment in order, with numbers from ``first_seq`` on and below ``end_seq``."""
    with path.open("rb") as file:
        size_bytes = file.seek(0, 2)
        at, expected = 0, first_seq
        while at < size_bytes:
            segment = _Range(file, size_bytes, expected, end_seq)
            record = segment.read_at(at) or segment.find_after(at)
            if record is None:
                return
            yield record
            at, expected = record.end, record.export.seq + 1


class _Range:
    """A file, and the numbers that its next record may have."""

    def __init__(self, file: BinaryIO, size_bytes: int, first_seq: int, end_seq: int) -> None:
        self._file = file
        self._size_bytes = size_bytes
        self._seqs = range(first_seq, min(end_seq, first_seq + SKIPPED_MAX))
        self._left_bytes = SEARCH_BYTES_MAX

    def read_at(self, at: int) -> Record | None:
        """The record that begins here, if one does."""
        self._file.seek(at)
        head = self._file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        length, crc, seq, meta_bytes = _HEAD.unpack(head)
        rest_bytes = length - (_HEAD.size - _PREFIX.size)
        end = at + _PREFIX.size + length
        if seq not in self._seqs or not meta_bytes <= rest_bytes <= RECORD_BYTES_MAX or end > self._size_bytes:
            return None
        self._left_bytes -= rest_bytes
        rest = self._file.read(rest_bytes)
        if len(rest) != rest_bytes or zlib.crc32(rest, zlib.crc32(head[_PREFIX.size :])) != crc:
            return None
        try:
            meta = _meta_decoder.decode(rest[:meta_bytes])
        except (msgspec.DecodeError, UnicodeDecodeError):  # the checksum can be right all the same
            return None
        payload = rest[meta_bytes:]
        export = Export(payload, meta.peer, meta.transport, meta.spans, "", seq, meta.arrived_unix_ns)
        return Record(export, at, end)

    def find_after(self, at: int) -> Record | None:
        """The next record behind a damaged one."""
        if not self._seqs:
            return None
        self._file.seek(at)
        prefix = self._file.read(_PREFIX.size)
        if len(prefix) == _PREFIX.size:
            told = self.read_at(at + _PREFIX.size + _PREFIX.unpack(prefix)[0])
            if told is not None and told.export.seq == self._seqs.start + 1:  # else a damaged length, by chance
                return told
        highs = {struct.pack("<Q", seq)[_LOW_BYTES:] for seq in (self._seqs.start, self._seqs.stop - 1)}
        pattern = re.compile(b"(?=" + b"|".join(map(re.escape, highs)) + b")", re.DOTALL)
        chunk_at = at + 1
        while self._left_bytes > 0:
            self._file.seek(chunk_at)
            chunk = self._file.read(_CHUNK_BYTES)
            for match in pattern.finditer(chunk):
                begin = chunk_at + match.start() - _LOW_BYTES - _SEQ_AT
                record = self.read_at(begin) if begin > at else None
                if record is not None or self._left_bytes <= 0:
                    return record
            if len(chunk) < _CHUNK_BYTES:
                return None
            chunk_at += len(chunk) - (struct.calcsize("<Q") - _LOW_BYTES - 1)
        return None


_NAME = re.compile(r"journal\.([0-9a-f]{16})")


class Full(OSError):
    """No room until a state was saved that contains the oldest entries."""


class Segment(NamedTuple):
    """A file of entries; ``last_seq`` may be less than ``first_seq``: then it holds none."""

    path: Path
    first_seq: int
    last_seq: int
    size_bytes: int


class Damage(NamedTuple):
    """What could not be read of an earlier process's journal."""

    size_bytes: int = 0
    """Bytes that are no whole record: damaged, or cut by the end of the process."""
    entries: int = 0
    """Numbers that are missing between those that could be read, and are in no state."""
    tail_bytes: int = 0
    """Of the bytes, those behind the last entry: at most one that was acknowledged."""


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
        self.last_seq = 0
        self._synced_seq = 0
        self.damage = Damage()

    # --- start and stop ---------------------------------------------------------------------------------------------

    def open(self, applied_seq: int) -> None:
        """Find what an earlier process left, and be ready to append after it.

        Raises:
            OSError: the directory cannot be used.
        """
        paths = sorted((path for path in self._directory.iterdir() if is_segment(path.name)), key=lambda p: p.name)
        first_seqs = [int(path.name.rpartition(".")[2], 16) for path in paths]
        missing = damaged_bytes = tail_bytes = 0
        expected = first_seqs[0] if first_seqs else 0
        for path, first_seq, end_seq in zip(paths, first_seqs, [*first_seqs[1:], SEQ_MAX], strict=False):
            last_seq, size_bytes = first_seq - 1, path.stat().st_size
            whole_bytes = tail_at = 0
            for record in read_records(path, first_seq, end_seq):
                missing += _missing(expected, record.export.seq, applied_seq)
                last_seq, expected = record.export.seq, record.export.seq + 1
                whole_bytes, tail_at = whole_bytes + record.end - record.begin, record.end
            tail_bytes = size_bytes - tail_at
            damaged_bytes += size_bytes - whole_bytes
            self._closed_segments.append(Segment(path, first_seq, last_seq, size_bytes))
            if end_seq != SEQ_MAX:
                missing += _missing(expected, end_seq, applied_seq)
                expected = end_seq
        self.damage = Damage(damaged_bytes, missing, tail_bytes)
        self.last_seq = max((applied_seq, *(segment.last_seq for segment in self._closed_segments)))
        self._synced_seq = self.last_seq

    def close(self) -> None:
        """Give the files back."""
        with self._lock:
            self._end_segment()

    # --- in ---------------------------------------------------------------------------------------------------------

    def append(self, export: Export) -> Export:
        """Write an export down; it comes back with its number.

        Raises:
            OSError: it could not be written, and nothing of it is there.
        """
        with self._lock:
            seq = self.last_seq + 1
            parts = record_parts(export, seq)
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
        end_seqs = [*(segment.first_seq for segment in segments[1:]), SEQ_MAX]
        return (
            record.export
            for segment, end_seq in zip(segments, end_seqs, strict=False)
            if segment.last_seq > after_seq
            for record in read_records(segment.path, segment.first_seq, end_seq)
            if record.export.seq > after_seq
        )

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

    def give_up_oldest(self, seq: int) -> int:
        """Remove the oldest file in which no entry lies behind ``seq``; its size, 0 if there is none."""
        with self._lock:
            for segment in self._closed_segments:
                if segment.last_seq <= seq and segment.size_bytes:
                    self._files.unlink(segment.path)
                    self._closed_segments.remove(segment)
                    return segment.size_bytes
        return 0


def _missing(expected: int, seq: int, applied_seq: int) -> int:
    """How many numbers from one to before the other are in no state."""
    return max(0, seq - max(expected, applied_seq + 1))


def is_segment(name: str) -> bool:
    """Whether a file of this name is one of a journal's."""
    return _NAME.fullmatch(name) is not None


def left_behind(directory: Path) -> bool:
    """Whether an earlier process left entries."""
    return any(is_segment(path.name) for path in directory.iterdir())
