"""Bytes of a payload that know where they change from lap to lap, and the change itself, in place."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tests.support import otlp_bytes as otlp

STEP_BYTES, MONOTONIC_BYTES = 4, 8
"""Widths of varints that keep them: step ids from 2^21 to 2^28, monotonic clocks from 2^49 to 2^56 ns."""


class Wire(NamedTuple):
    """Encoded bytes, and where something in them moves on from lap to lap: (what, offset)."""

    data: bytes
    marks: tuple[tuple[str, int], ...] = ()


def joined(parts: Iterable[Wire | bytes]) -> Wire:
    """Parts one after the other."""
    data, marks, at = [], [], 0
    for part in parts:
        piece = part if isinstance(part, Wire) else Wire(part)
        data.append(piece.data)
        marks += [(what, at + offset) for what, offset in piece.marks]
        at += len(piece.data)
    return Wire(b"".join(data), tuple(marks))


def nested(number: int, *parts: Wire | bytes) -> Wire:
    """A length-delimited field."""
    content = joined(parts)
    return joined([otlp.varint(number << 3 | 2) + otlp.varint(len(content.data)), content])


def fixed(number: int, unix_ns: int) -> Wire:
    """A time of day, fixed64."""
    return Wire(otlp.varint(number << 3 | 1) + struct.pack("<Q", unix_ns), (("unix", 1),))


def identity(number: int, content: bytes) -> Wire:
    """A trace or span id; its first eight bytes differ from lap to lap."""
    return Wire(otlp.field(number, content), (("id", 2),))


def moving(key: str, value: float, what: str, number: int = 3) -> Wire:
    """An attribute whose value moves on: ``step``, ``monotonic`` (integers) or ``seconds`` (a double)."""
    data = otlp.attribute(key, value, number=number)
    width = {"step": STEP_BYTES, "monotonic": MONOTONIC_BYTES, "seconds": 8}[what]
    return Wire(data, ((what, len(data) - width),))


def event(name: str, unix_ns: int, attributes: Sequence[Wire | bytes]) -> Wire:
    return nested(11, fixed(1, unix_ns), otlp.field(2, name.encode()), *attributes)


def span(ids: Sequence[Wire], name: str, start_unix_ns: int, end_unix_ns: int, content: Sequence[Wire | bytes]) -> Wire:
    times = (fixed(7, start_unix_ns), fixed(8, end_unix_ns))
    return nested(2, *ids, otlp.field(5, name.encode()), *times, *content)


def move_varints(data: np.ndarray, places: np.ndarray, move: int, width: int) -> None:
    """Add to varints of a fixed width, in place."""
    shifts = 7 * np.arange(width)
    cells = places[:, None] + np.arange(width)
    values = ((data[cells].astype(np.int64) & 0x7F) << shifts).sum(axis=1) + move
    groups = (values[:, None] >> shifts) & 0x7F
    groups[:, :-1] |= 0x80
    data[cells] = groups
