"""Span events as OTLP bytes, written by hand.

    Event     1 time_unix_nano fixed64 | 2 name string | 3 attributes KeyValue*
    KeyValue  1 key string | 2 value AnyValue
    AnyValue  1 string | 2 bool | 3 int64 | 4 double | 7 bytes

Why not protobuf objects: the exporter's thread shares the interpreter lock with the engine's; objects cost 22 to 47 us
per step, these tables some 8 us (bench/hook_cost.py). Envelopes (resource, scope, span) are built with
opentelemetry-proto, once per chunk; the events' bytes are appended to the serialised span, which protobuf allows:
fields may come in any order. tests/plugin/test_wire.py compares with opentelemetry-proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

Value = str | bool | int | float | bytes

_U64: Final = (1 << 64) - 1
_double = struct.Struct("<d").pack
_fixed64 = struct.Struct("<Q").pack


def varint(number: int) -> bytes:
    """Return the protobuf varint of a number; negative ones as two's complement in 64 bits."""
    number &= _U64
    head = b""
    while number >= _PAIRS:
        head += _CONTINUED[number & (_PAIRS - 1)]
        number >>= 14
    return head + _LAST[number]


def _seven_bits(number: int, continued: bool) -> bytes:
    """Return the groups of a number below 2^14, lowest first; two of them, all marked, if more groups follow."""
    low, high = number & 0x7F, number >> 7
    if continued:
        return bytes((low | 0x80, high | 0x80))
    return bytes((low | 0x80, high)) if high else bytes((low,))


_PAIRS: Final = 1 << 14
_CONTINUED: Final = [_seven_bits(n, continued=True) for n in range(_PAIRS)]
_LAST: Final = [_seven_bits(n, continued=False) for n in range(_PAIRS)]
"""Tables of 14 bits, 1 MB in all: a time stamp takes four look-ups instead of eight turns of a loop."""


def field(tag: int, payload: bytes) -> bytes:
    """Return a length-delimited field."""
    return varint(tag << 3 | 2) + varint(len(payload)) + payload


def _heads(key: str) -> tuple[bytes, ...]:
    """All that precedes an int attribute's varint, by the length of that varint (1 to 10 bytes)."""
    name = field(1, key.encode())
    return tuple(
        b"\x1a" + varint(len(name) + 2 + 1 + size) + name + b"\x12" + varint(1 + size) + b"\x18" for size in range(11)
    )


class IntAttributes:
    """Encodes a fixed list of int attributes, in order."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._heads = tuple(_heads(key) for key in keys)

    def encode(self, values: Iterable[int]) -> bytes:
        """Return the attributes' bytes; values stand in the order of the keys."""
        last = _LAST
        parts: list[bytes] = []
        for heads, value in zip(self._heads, values):  # noqa: B905 strict= costs, lengths are the caller's contract
            body = last[value] if 0 <= value < _PAIRS else varint(value)
            parts.append(heads[len(body)])
            parts.append(body)
        return b"".join(parts)


def attribute(key: str, value: Value) -> bytes:
    """Return one attribute of any scalar type, as field 3 of an Event."""
    if isinstance(value, str):
        body = field(1, value.encode("utf-8", "replace"))
    elif isinstance(value, bool):
        body = b"\x10\x01" if value else b"\x10\x00"
    elif isinstance(value, int):
        body = b"\x18" + varint(value)
    elif isinstance(value, float):
        body = b"\x21" + _double(value)
    else:
        body = field(7, value)
    return field(3, field(1, key.encode()) + field(2, body))


def event(name: str, unix_ns: int, attributes: bytes) -> bytes:
    """Return one Event as field 11 of a Span; attributes are already encoded."""
    return field(11, b"\x09" + _fixed64(unix_ns & _U64) + field(2, name.encode()) + attributes)
