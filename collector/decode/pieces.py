"""Large exports in pieces: each is an export of its own, with some of the spans and all that is said about them.

    resource ─┬─ scope A ─┬─ spans 1…40          resource ── scope A ── spans 1…40
              │           └─ spans 41…80    ─►   resource ── scope A ── spans 41…80
              └─ scope B ── spans 81…90          resource ── scope B ── spans 81…90

Parsed at once, an export of 24 MB takes 60 MB beside itself; piece by piece it takes a few. Nothing below a span is
looked at or cut, and every byte but the lengths is copied as it is, unknown fields included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from . import wire

PIECE_BYTES: Final = 2 << 20
"""An export up to this size is one piece: some 4,000 steps, beyond which nothing becomes cheaper."""
OWN_SHARE: Final = 8
"""What is repeated in every piece may be an eighth of it, or the export stays whole: its cost must not multiply."""

_CONTAINERS: Final = (1, 2, 2)
"""By depth, the number of the repeated field below: resource_spans, scope_spans, spans."""

Segments = list[memoryview | bytes]
"""The content of a message, in several buffers."""


def pieces(payload: bytes, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """Exports that together hold the spans of one, in order; the export itself if it is small, or cannot be cut.

    What is wrong with bytes that cannot be cut is for their decoder to say.
    """
    if len(payload) <= piece_bytes:
        yield payload
        return
    try:
        parts = list(_cut(memoryview(payload), 0, piece_bytes))
    except (IndexError, ValueError):
        parts = []
    if len(parts) < 2:  # noqa: PLR2004
        yield payload
        return
    for part in parts:
        yield b"".join(part)


def _cut(message: memoryview, depth: int, piece_bytes: int) -> Iterator[Segments]:
    """Contents of messages like this one, none much larger than a piece if its items are not."""
    own: Segments = []
    items: list[tuple[memoryview, int]] = []
    for field, body_at, number in _fields(message):
        if number == _CONTAINERS[depth]:
            items.append((field, body_at))
        else:
            own.append(field)
    if _size(own) > piece_bytes // OWN_SHARE:
        raise ValueError("too much would be repeated")
    part, size = list(own), 0
    for field, body_at in items:
        if size and size + len(field) > piece_bytes:
            yield part
            part, size = list(own), 0
        if len(field) > piece_bytes and depth + 1 < len(_CONTAINERS):
            tag = bytes([_CONTAINERS[depth] << 3 | wire.BYTES])
            for inner in _cut(field[body_at:], depth + 1, piece_bytes):
                yield [*own, tag, wire.varint(_size(inner)), *inner]
        else:
            part.append(field)
            size += len(field)
    if size or not items:
        yield part


def _fields(message: memoryview) -> Iterator[tuple[memoryview, int, int]]:
    """Each field whole, where its body begins, and its number if it has a length; ValueError if it does not tile."""
    at, end = 0, len(message)
    while at < end:
        start = at
        tag, body_at, at = wire.read_field(message, start)
        if at > end or tag & 7 in wire.GROUP:
            raise ValueError("a group, or a field that leaves its message")
        yield message[start:at], body_at - start, tag >> 3 if tag & 7 == wire.BYTES else 0


def _size(part: Segments) -> int:
    return sum(map(len, part))
