"""The protobuf wire format, as far as it is walked by hand: varints, and what follows a tag."""

from __future__ import annotations

from typing import Final

VARINT, I64, BYTES, I32 = 0, 1, 2, 5
GROUP: Final = frozenset({3, 4})
"""Where a group begins and ends: deprecated since 2008, in no schema that is read here."""
_FIXED_BYTES: Final = {I64: 8, I32: 4} | dict.fromkeys(GROUP, 0)

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


def read_field(data: bytes | memoryview, at: int) -> tuple[int, int, int]:
    """Tag of a field, where its body begins, where the next field begins; each end of a group is a field of its own.

    Raises:
        IndexError: the data end before the body begins.
        ValueError: a number has no end, or the wire type does not exist.
    """
    tag, at = data[at], at + 1
    if tag >= _LAST:
        tag, at = read_varint(data, at - 1)
    kind = tag & 7
    if kind == BYTES:
        length, at = data[at], at + 1
        if length >= _LAST:
            low, length = length & 0x7F, data[at]
            if length < _LAST:  # two bytes, as most spans have
                length, at = low | length << 7, at + 1
            else:
                length, at = read_varint(data, at - 1)
        return tag, at, at + length
    if kind == VARINT:
        return tag, at, read_varint(data, at)[1]
    if kind not in _FIXED_BYTES:
        raise ValueError("an unknown wire type")
    return tag, at, at + _FIXED_BYTES[kind]
