"""What a recording's bytes are: how they are compressed, and where one entry ends; told by content, never by name.

    lines               a JSON object each
    varint + protobuf   each export preceded by its length as a varint
    u32 + entry         each preceded by its length as four bytes, big endian: the OpenTelemetry Collector's file
                        exporter with ``format: proto``, or with ``compression: zstd`` and each entry compressed alone

The whole may be gzipped or compressed with zstd. A protobuf export begins with the tag of ``resource_spans``, which is
what tells the two kinds of lengths apart.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from typing import Any, BinaryIO, Final, cast

GZIP: Final = b"\x1f\x8b"
ZSTD: Final = b"\x28\xb5\x2f\xfd"
EXPORT_BYTES_MAX: Final = 1 << 30
SNIFF_BYTES: Final = 64
_FIRST_TAG: Final = 0x0A
_VARINT_BYTES_MAX: Final = 5
_WINDOW_BYTES_MAX: Final = 1 << 27
_NOT_READ: Final = {
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
}


class NotReadError(ValueError):
    """The file is of a kind that is known and not read; the text says which."""


class DamagedError(ValueError):
    """The bytes break within what they are compressed with."""


class NoEntryError(DamagedError):
    """The bytes end, or are something else, where an entry should be."""


class _Rejoined(io.RawIOBase):
    """The bytes that were looked at, and then the rest."""

    def __init__(self, head: bytes, rest: Any) -> None:
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._head:
            return cast("int", self._rest.readinto(buffer) or 0)
        taken = self._head[: len(buffer)]
        buffer[: len(taken)] = taken
        self._head = self._head[len(taken) :]
        return len(taken)


def sniff(stream: Any) -> tuple[bytes, io.BufferedReader]:
    """The first bytes, and all of them to be read; a pipe need not be able to go back."""
    head = stream.read(SNIFF_BYTES) or b""
    return head, io.BufferedReader(_Rejoined(head, stream))


def decompressed(raw: BinaryIO) -> io.BufferedReader:
    """The bytes without their compression.

    Raises:
        NotReadError: they are compressed with, or are, something else.
    """
    head, stream = sniff(raw)
    if head.startswith(GZIP):
        return io.BufferedReader(cast("Any", gzip.GzipFile(fileobj=stream)))
    if head.startswith(ZSTD):
        return io.BufferedReader(cast("Any", _zstd(stream)))
    for magic, name in _NOT_READ.items():
        if head.startswith(magic):
            raise NotReadError(f"{name} is not read, only plain files, gzip and zstd")
    return stream


def _zstd(stream: Any) -> Any:
    zstandard = _zstandard()
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
    return _Guarded(decompressor.stream_reader(stream, read_across_frames=True), zstandard.ZstdError)


def _zstandard() -> Any:
    try:
        import zstandard  # noqa: PLC0415 -- an extra: few recordings need it
    except ImportError:
        raise NotReadError("zstd needs a package that is not installed: install tracefit's extra zstd") from None
    return zstandard


def _whole_frame(entry: bytes) -> bytes:
    zstandard = _zstandard()
    frame = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX).decompressobj()
    try:
        out: bytes = frame.decompress(entry)
    except zstandard.ZstdError as error:
        raise DamagedError(str(error)) from None
    if not frame.eof:
        raise DamagedError("an entry is cut short")
    return out


class _Guarded(io.RawIOBase):
    """A stream whose own kind of error is a DamagedError."""

    def __init__(self, stream: Any, error: type[Exception]) -> None:
        self._stream = stream
        self._error = error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return cast("int", self._stream.readinto(buffer))
        except self._error as error:
            raise DamagedError(str(error)) from None


def is_json(head: bytes) -> bool:
    """A brace and then a key; the first export of another kind, 123 bytes long, never looks like that."""
    head = head.lstrip()
    return head.startswith(b"{") and head[1:].lstrip()[:1] in {b'"', b"}"}


def entries(head: bytes, stream: io.BufferedReader) -> Iterator[bytes]:
    """Entries that are preceded by their length; each is protobuf, or a JSON object.

    Raises:
        NoEntryError: an entry is cut short, or there is no length where one should be.
        DamagedError: an entry cannot be decompressed.
    """
    read_length = _read_u32 if _has_u32_lengths(head) else _read_varint
    while (length := read_length(stream)) is not None:
        if length > EXPORT_BYTES_MAX:
            raise NoEntryError("no length where an export should begin")
        entry = stream.read(length)
        if len(entry) < length:
            raise NoEntryError("the last export is cut short")
        yield _whole_frame(entry) if entry.startswith(ZSTD) else entry


def _has_u32_lengths(head: bytes) -> bool:
    behind = head[4:]
    if not (behind.startswith(ZSTD) or behind[:1] == bytes([_FIRST_TAG]) or is_json(behind)):
        return False
    at = next((at for at, byte in enumerate(head[:_VARINT_BYTES_MAX]) if byte < 0x80), 0)  # noqa: PLR2004
    return head[at + 1 : at + 2] != bytes([_FIRST_TAG])


def _read_u32(stream: io.BufferedReader) -> int | None:
    data = stream.read(4)
    if not data:
        return None
    if len(data) < 4:  # noqa: PLR2004
        raise NoEntryError("a length is cut short")
    return int.from_bytes(data, "big")


def _read_varint(stream: io.BufferedReader) -> int | None:
    length = 0
    for index in range(_VARINT_BYTES_MAX):
        byte = stream.read(1)
        if not byte:
            if index:
                raise NoEntryError("a length is cut short")
            return None
        length |= (byte[0] & 0x7F) << (7 * index)
        if byte[0] < 0x80:  # noqa: PLR2004 -- the continuation bit
            return length
    raise NoEntryError("no length where an export should begin")
