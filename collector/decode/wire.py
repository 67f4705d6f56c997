"""The protobuf wire format, as far as it is walked by hand: varints, and what follows a tag."""

from __future__ import annotations

from typing import Final

VARINT, I64, BYTES, I32 = 0, 1, 2, 5
FIXED_BYTES: Final = {I64: 8, I32: 4}

_LAST: Final = 0x80
"""Bytes below it end a varint."""
_SHIFT_MAX: Final = 63
"""A varint has at most ten bytes."""


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Value, and where the next field begins.

    Raises:
        IndexError: the data end before it does.
        ValueError: it has more than ten bytes.
    """
    byte = data[at]
    if byte < _LAST:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < _LAST:
            return value, at + 1
        shift += 7
        if shift > _SHIFT_MAX:
            raise ValueError("a varint without an end")


def varint(value: int) -> bytes:
    """A non-negative integer as a varint."""
    out = bytearray()
    while value >= _LAST:
        out.append(value & 0x7F | _LAST)
        value >>= 7
    out.append(value)
    return bytes(out)
