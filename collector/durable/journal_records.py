"""One entry of the journal as bytes, and the whole entries of a segment, also of a damaged one.

    record = length u32 | CRC-32 u32 | number u64 | meta length u16 | meta (MessagePack) | payload       little endian

``length`` counts what follows the CRC, and the CRC covers it. Numbers grow by one along a segment.

Behind a record that is damaged, the next one is looked for: where the damaged one says that it ends, and else byte by
byte, by the high bytes of the numbers that may follow. A record counts as found if its lengths fit, its number follows
and its checksum is right, so that damage costs the records that it lies in and no other. What the search may read is
bounded: bytes made to look like heads cost time, and never more than ``SEARCH_BYTES_MAX``.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec

from collector.decode import ForeignSpans
from collector.receive import Export

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
    foreign: ForeignSpans = ForeignSpans()  # not in entries of earlier versions, nor is what follows
    arrived_unix_ns: int = 0


_meta_decoder = msgspec.msgpack.Decoder(_Meta)


def record_parts(export: Export, seq: int) -> list[bytes]:
    """A record in two buffers, so that the payload is not copied."""
    said = _Meta(export.peer, export.transport, export.spans, export.foreign, export.arrived_unix_ns)
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
        export = Export(payload, meta.peer, meta.transport, meta.spans, "", seq, meta.foreign, meta.arrived_unix_ns)
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
