"""Templates of step.BATCH_SUMMARY: events that are equal but for their values become columns in a few numpy passes.

An event is  ``09 time[8] 12 12 "step.BATCH_SUMMARY"``  and then per attribute, K bytes of key and V bytes of AnyValue,

    1A L   0A K key[K]   12 V   18 varint[V-1]  |  21 double[8]        L = K + V + 4, every length below 128

Consecutive steps differ in little but their values, and those seldom in how many bytes they take: of a thousand events
in a row, nearly all have one of a few shapes. So one event of each shape is walked byte by byte, and of all others that
are as long, every byte is compared at once with its own:

    event      09 t t t t t t t t 12 12 s t e p … 18 8D 92 03 1A … 21 d d d d d d d d …
    mask       FF 0 0 0 0 0 0 0 0 FF FF F F F F … FF 80 80 80 FF … FF 0 0 0 0 0 0 0 0 …

What passes has the same keys, types and lengths, and varints that end where those do: its values stand where they stand
in the event that was walked. Then every check of the plain decoder is made on them. All other events (and varints
beyond 8 bytes, negative numbers among them) are the plain decoder's business: here nothing is ever rejected.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import vocabulary as words
from .records import MISSING, STEP_FIELDS

U64 = NDArray[np.uint64]
Index = NDArray[np.intp]
Mask = NDArray[np.bool_]

ATTRIBUTES_MAX: Final = 40
KEY_MAX: Final = 64
EVENT_MAX: Final = 4096
"""Longer events have no template; ATTRIBUTES_MAX attributes of KEY_MAX bytes fit."""

_TAG_TIME, _TAG_NAME, _TAG_ATTRIBUTE, _TAG_KEY, _TAG_VALUE = 0x09, 0x12, 0x1A, 0x0A, 0x12
_TAG_INT, _TAG_DOUBLE = 0x18, 0x21
_NAME: Final = bytes([_TAG_NAME, len(words.SUMMARY_EVENT)]) + words.SUMMARY_EVENT.encode()
_TIME_AT, _NAME_AT = 1, 9
_BODY_AT: Final = _NAME_AT + len(_NAME)
_AROUND_KEY: Final = 7
"""Bytes of an attribute up to its value, beside the key."""
_CONTINUED: Final = 0x80
"""Set in every byte of a varint but the last."""

_WORD: Final = 8
COLUMNS: Final = len(STEP_FIELDS)
_COLUMN: Final = {name: column for column, name in enumerate(STEP_FIELDS)}
_COLUMN_OF_KEY: Final = {key.encode(): _COLUMN[field.name] for key, field in words.SUMMARY_FIELDS.items()}
_UNIX: Final = _COLUMN["unix_ns"]
_ALL_BITS, _LOW_BITS = 0xFFFF_FFFF_FFFF_FFFF, 0x7F7F_7F7F_7F7F_7F7F
_NOTHING, _CONTINUATION = bytes(_WORD), bytes([_CONTINUED] * _WORD)
_HEAD_MASK: Final = np.frombuffer(b"\xff" + bytes(_WORD) + b"\xff" * len(_NAME) + bytes(-_BODY_AT % _WORD), np.uint64)
_HEAD: Final = np.frombuffer(bytes([_TAG_TIME]) + bytes(_WORD) + _NAME + bytes(-_BODY_AT % _WORD), np.uint64)
"""What a summary begins with, the time left out."""
_BY_NAME: Final = {field.name: field for field in words.SUMMARY_FIELDS.values()}
_REQUIRED: Final = {name for name, field in _BY_NAME.items() if field.required}
_BITS: Final = np.array([name == "unix_ns" or _BY_NAME[name].double for name in STEP_FIELDS]).nonzero()[0]
"""Columns that are no varints."""
_UNIX_MIN: Final = np.uint64(words.UNIX_MIN)
_SQUEEZES: Final = tuple(
    (np.uint64(low), np.uint64(low << high), np.uint64(bits))
    for bits, low, high in ((1, 0x007F007F007F007F, 8), (2, 0x00003FFF00003FFF, 16), (4, 0x0FFFFFFF, 32))
)


def _limit(field: words.Field) -> int:
    """Largest good value as bits: non-negative doubles compare as their bits do, and what is not finite is larger."""
    return struct.unpack("<Q", struct.pack("<d", field.limit))[0] if field.double else field.limit


_LIMITS: Final = np.array(
    [words.UNIX_MAX if name == "unix_ns" else _limit(_BY_NAME[name]) for name in STEP_FIELDS], np.uint64
)

EventLayout = tuple[tuple[bytes, int], ...]
"""Key and type tag of each attribute, in order."""


class Shape(NamedTuple):
    """What an event looks like: its layout, and where each value begins and ends."""

    layout: EventLayout
    values: tuple[tuple[int, int], ...]


def shape(event: bytes) -> Shape | None:
    """The shape of an event, None if it is not a summary of the form above."""
    end = len(event)
    if end > EVENT_MAX or event[:1] != bytes([_TAG_TIME]) or event[_NAME_AT:_BODY_AT] != _NAME:
        return None
    pairs, values = [], []
    at = _BODY_AT
    try:
        while at < end:
            key_bytes = event[at + 3]
            value_at, stop = at + key_bytes + _AROUND_KEY, at + 2 + event[at + 1]
            tag = event[value_at - 1]
            if not _is_attribute(event, at, value_at, stop) or key_bytes > KEY_MAX:
                return None
            pairs.append((event[at + 4 : at + 4 + key_bytes], tag))
            values.append((value_at, stop))
            at = stop
    except IndexError:
        return None
    return Shape(tuple(pairs), tuple(values)) if at == end and len(pairs) <= ATTRIBUTES_MAX else None


def _is_attribute(event: bytes, at: int, value_at: int, stop: int) -> bool:
    """Whether tags and lengths are those of an attribute from ``at`` to ``stop``, and the value fills its place."""
    width = stop - value_at
    tags = (event[at], event[at + 2], event[value_at - 3])
    if tags != (_TAG_ATTRIBUTE, _TAG_KEY, _TAG_VALUE) or not 1 <= width <= _WORD or event[value_at - 2] != width + 1:
        return False
    tag = event[value_at - 1]
    if tag == _TAG_DOUBLE:
        return width == _WORD
    continued = min(event[value_at : stop - 1], default=_CONTINUED) >= _CONTINUED
    return tag == _TAG_INT and continued and event[stop - 1] < _CONTINUED


def learnable(layout: EventLayout) -> bool:
    """The plain decoder would take such an event if its values are good: every field once, of its type."""
    if not all(key.isascii() for key, _ in layout):
        return False
    fields = [(words.SUMMARY_FIELDS.get(key.decode()), tag) for key, tag in layout]
    names = [field.name for field, _ in fields if field]
    return (
        len(set(names)) == len(names)
        and all(field is None or field.double == (tag == _TAG_DOUBLE) for field, tag in fields)
        and set(names) >= _REQUIRED
    )


class Events:
    """Some hundred events, one behind the other in one buffer."""

    def __init__(self, events: list[bytes]) -> None:
        self.sizes: Index = np.fromiter(map(len, events), np.intp, len(events))
        if self.sizes.max() > EVENT_MAX:
            events = [event if len(event) <= EVENT_MAX else b"" for event in events]
            self.sizes[self.sizes > EVENT_MAX] = 0
        self._starts: Index = np.cumsum(self.sizes) - self.sizes
        self._data = b"".join((*events, bytes(_BODY_AT + _WORD)))  # behind the last: whoever looks may look beyond it

    def heads(self, which: Index, count: int) -> U64:
        """So many words from the start of each, a row per event."""
        size = count * _WORD
        pieces: NDArray[np.void] = np.ndarray((len(self._data) - size + 1,), f"V{size}", self._data, strides=(1,))
        return pieces[self._starts[which]].view(np.uint64).reshape(len(which), count)

    @cached_property
    def are_summaries(self) -> Mask:
        """Which begin as a summary does."""
        heads = self.heads(np.arange(len(self.sizes)), len(_HEAD))
        heads &= _HEAD_MASK
        same: Mask = (heads == _HEAD).all(axis=1)
        return same


class Template:
    """An event whose values are left out, ready to be compared with many; of a shape whose layout is learnable."""

    __slots__ = ("_at", "_constant", "_keep", "_mask", "missing")

    def __init__(self, event: bytes, found: Shape) -> None:
        mask = bytearray(b"\xff" * len(event) + bytes(-len(event) % _WORD + _WORD))
        mask[_TIME_AT:_NAME_AT] = bytes(_WORD)
        at, keep = [0] * COLUMNS, [0] * COLUMNS
        at[_UNIX], keep[_UNIX] = _TIME_AT, _ALL_BITS
        for (key, tag), (value_at, stop) in zip(found.layout, found.values, strict=True):
            width = stop - value_at
            is_double = tag == _TAG_DOUBLE
            mask[value_at:stop] = (_NOTHING if is_double else _CONTINUATION)[:width]
            column = _COLUMN_OF_KEY.get(key)
            if column is not None:
                at[column] = value_at
                keep[column] = _ALL_BITS if is_double else _LOW_BITS >> 8 * (_WORD - width)
        self._at: Index = np.array(at)
        """By column, where 8 bytes begin that start with its value; which of their bits are the value's."""
        self._keep: U64 = np.array(keep, np.uint64)
        self.missing: Index = np.flatnonzero(self._keep == 0)
        """Columns of which there is no attribute."""
        self._mask: U64 = np.frombuffer(bytes(mask), np.uint64)
        self._constant: U64 = np.frombuffer(event.ljust(len(mask), b"\0"), np.uint64) & self._mask

    def fits(self, events: Events, which: Index, values: U64) -> Mask:
        """Whether events of this size are the same but for their values, which go to their rows."""
        heads = events.heads(which, len(self._mask))
        columns = np.ndarray((len(heads), heads.shape[1] * _WORD - _WORD), "<u8", heads, strides=(heads.strides[0], 1))
        values[which] = columns[:, self._at] & self._keep
        heads &= self._mask
        same = heads == self._constant
        return np.ones(len(which), np.bool_) if same.all() else same.all(axis=1)


def read_values(values: U64, fitting: list[tuple[Template, Index]]) -> Mask:
    """Whether the plain decoder would take them, row by row; they become rows of STEP_FIELDS in place."""
    _join_varints(values)
    ok = values[:, _UNIX] >= _UNIX_MIN
    if not (good := values <= _LIMITS).all():
        ok &= good.all(axis=1)
    rows = values.view(np.int64)
    for template, which in fitting:
        if len(template.missing):
            rows[which[:, None], template.missing] = MISSING
    column = {name: rows[:, place] for name, place in _COLUMN.items()}
    ok &= column["ts_end_ns"] >= column["ts_start_ns"]
    ok &= column["prefill_tokens"] + column["decode_tokens"] == column["scheduled_tokens"]
    ok &= column["kv_blocks_free"] <= column["kv_blocks_total"]
    return ok


class Matched(NamedTuple):
    """Which of the events passed, and their rows, a column per field of STEP_FIELDS (doubles as their bits)."""

    at: Index
    rows: NDArray[np.int64]


def _join_varints(values: U64) -> None:
    """Varints without their continuation bits to integers, in place: the gaps between their bytes are closed."""
    bits = values[:, _BITS]
    for low, high, shift in _SQUEEZES:
        upper = values & high
        upper >>= shift
        values &= low
        values |= upper
    values[:, _BITS] = bits
