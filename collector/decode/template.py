"""Layouts of step.BATCH_SUMMARY: many events with the same keys in the same order become columns in a few numpy passes.

An event is  ``09 time[8] 12 12 "step.BATCH_SUMMARY"``  and then per attribute, K bytes of key and V bytes of AnyValue,

    1A L   0A K key[K]   12 V   18 varint[V-1]  |  21 double[8]        L = K + V + 4, every length below 128

Positions differ from event to event, because varints have different widths; lengths are followed attribute by attribute
for all events at once. What an attribute holds up to its type is then gathered in one piece (to gather 56 bytes takes
numpy no longer than 8) that ends with the 8 bytes of the value, and every byte that is not a value is compared at once:

    piece   ........ 1A L 0A K key[K] 12 V 18 | value[8]        masked: what lies before, L, V and the value

L is what was followed; V must be what L says, and the varint must end exactly there.

An event passes only if its attributes tile it from the name to its end, so that nothing outside of it is read, and if
every check of the plain decoder holds for its values. All others (and varints beyond 8 bytes, negative numbers among
them) are the plain decoder's business: here nothing is ever rejected.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import vocabulary as words
from .records import MISSING, STEP_FIELDS

U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]
Index = NDArray[np.intp]
Mask = NDArray[np.bool_]

ATTRIBUTES_MAX: Final = 40
KEY_MIN: Final = 3
"""A shorter one would put L or V into the wrong word."""
KEY_MAX: Final = 64
EVENT_MAX: Final = 4096
"""Longer events have no template; ATTRIBUTES_MAX attributes of KEY_MAX bytes fit."""
PAD: Final = 256
"""Zero bytes behind the events: more than one attribute is long, so that a wrong length leads nowhere else."""

_TAG_TIME, _TAG_NAME, _TAG_ATTRIBUTE, _TAG_KEY, _TAG_VALUE = 0x09, 0x12, 0x1A, 0x0A, 0x12
_TAG_INT, _TAG_DOUBLE = 0x18, 0x21
_NAME: Final = bytes([_TAG_NAME, len(words.SUMMARY_EVENT)]) + words.SUMMARY_EVENT.encode()
_NAME_AT: Final = 9
_NAME_WORDS: Final = (0, 8, len(_NAME) - 8)
_BODY_AT: Final = _NAME_AT + len(_NAME)

_COLUMN: Final = {name: column for column, name in enumerate(STEP_FIELDS)}
_ANYTHING: Final = (1 << 64) - 1
_WORD: Final = 8
_FRONT: Final = KEY_MAX + _WORD
"""Zero bytes before the events: a piece of the first one may begin there."""
_AROUND_KEY: Final = 7
"""Bytes of an attribute up to its value, beside the key."""
_UNIX_MIN: Final = np.uint64(words.UNIX_MIN)
_UNIX_SPAN: Final = np.uint64(words.UNIX_MAX - words.UNIX_MIN)
_VALUE_MIN, _VALUE_MAX = 2, 9
"""V of a varint of one byte; V of one of eight, or of a double."""
_TWO_BYTES: Final = 3
_LOW_BYTES: Final = np.array([0] + [(1 << 8 * n) - 1 for n in range(_VALUE_MAX)], np.uint64)
"""By V: the bytes that belong to the varint."""
_CONTINUE: Final = np.uint64(0x8080808080808080)
_CONTINUED: Final = np.append(np.uint64(0), _LOW_BYTES[:-1] & _CONTINUE)
"""By V: the continuation bits of a varint that ends with it."""
_SQUEEZES: Final = {
    bits: (np.uint64(low), np.uint64(low << high), np.uint64(bits))
    for bits, low, high in ((1, 0x007F007F007F007F, 8), (2, 0x00003FFF00003FFF, 16), (4, 0x0FFFFFFF, 32))
}

EventLayout = tuple[tuple[bytes, int], ...]
"""Key and type tag of each attribute, in order."""


def shape(event: bytes) -> EventLayout | None:
    """The layout of an event, None if it is not a summary of the form above."""
    end = len(event)
    if end > EVENT_MAX or event[:1] != b"\x09" or event[_NAME_AT:_BODY_AT] != _NAME:
        return None
    pairs = []
    at = _BODY_AT
    try:
        while at < end:
            key_bytes = event[at + 3]
            tag = event[at + key_bytes + 6]
            if not KEY_MIN <= key_bytes <= KEY_MAX or tag not in (_TAG_INT, _TAG_DOUBLE):
                return None
            pairs.append((event[at + 4 : at + 4 + key_bytes], tag))
            at += 2 + event[at + 1]
    except IndexError:
        return None
    return tuple(pairs) if at == end and len(pairs) <= ATTRIBUTES_MAX else None


def learnable(layout: EventLayout) -> bool:
    """The plain decoder would take such an event if its values are good: every field once, of its type."""
    if not all(key.isascii() for key, _ in layout):
        return False
    fields = [(words.SUMMARY_FIELDS.get(key.decode()), tag) for key, tag in layout]
    names = [field.name for field, _ in fields if field]
    return (
        len(set(names)) == len(names)
        and all(field is None or field.double == (tag == _TAG_DOUBLE) for field, tag in fields)
        and {field.name for field in words.SUMMARY_FIELDS.values() if field.required} <= set(names)
    )


class Events:
    """Some hundred events, one behind the other in one buffer; ``words[p]`` are the 8 bytes from p on."""

    __slots__ = ("_data", "bytes", "ends", "starts", "words")

    def __init__(self, events: list[bytes]) -> None:
        parts = (bytes(_FRONT), *events, bytes(PAD))
        data = b"".join(parts)
        self._data = data
        self.bytes: U8 = np.frombuffer(data, np.uint8)
        self.words: U64 = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
        ends = np.cumsum(np.fromiter(map(len, parts), np.intp, len(parts)))
        self.starts: Index = ends[:-2]
        self.ends: Index = ends[1:-1]

    def pieces(self, dtype: np.dtype[np.void]) -> NDArray[np.void]:
        """So many bytes from each place on, as ``words``."""
        return np.ndarray((len(self._data) - dtype.itemsize + 1,), dtype, self._data, strides=(1,))

    def summaries(self) -> Index:
        """Which of them begin as a summary does; those that are too short cannot reach the end of a layout."""
        ok = self.bytes[self.starts] == _TAG_TIME
        for offset in _NAME_WORDS:
            ok &= self.words[self.starts + (_NAME_AT + offset)] == _word(_NAME, offset)
        return np.flatnonzero(ok)


def _word(data: bytes, at: int) -> np.uint64:
    return np.uint64(struct.unpack_from("<Q", data, at)[0])


class Matched(NamedTuple):
    """Which of the events passed, and their rows, a column per field of STEP_FIELDS (doubles as their bits)."""

    at: Index
    rows: NDArray[np.int64]


class Template:
    """One layout, ready to be compared with many events."""

    def __init__(self, layout: EventLayout) -> None:
        keys = [key for key, _ in layout]
        self._n = len(layout)
        self._key_bytes = np.array([len(key) for key in keys], np.intp)[:, None]
        self._passed = 2 * np.arange(self._n + 1)[:, None]
        self._double = np.array([tag == _TAG_DOUBLE for _, tag in layout])[:, None]
        self._doubles = np.flatnonzero(self._double)
        self._size_min = np.where(self._double, _VALUE_MAX, _VALUE_MIN).astype(np.uint64)
        self._size_span = np.uint64(_VALUE_MAX) - self._size_min
        size = _WORD * -(-(max(map(len, keys)) + _AROUND_KEY) // _WORD)
        self._piece_at = np.array([len(key) + _AROUND_KEY for key in keys], np.intp) - size
        self._piece = np.dtype((np.void, size + _WORD))
        pieces = [_piece(key, tag, size) for key, tag in layout]
        self._mask = np.frombuffer(b"".join(mask for _, mask in pieces), np.uint64)
        self._constant = np.frombuffer(b"".join(constant for constant, _ in pieces), np.uint64)
        self._value_word = size // _WORD
        fields = [words.SUMMARY_FIELDS.get(key.decode("latin-1")) for key in keys]
        self._limit = np.array([_limit(field) for field in fields], np.uint64)[:, None]
        self._row = {field.name: row for row, field in enumerate(fields) if field}
        self._from = np.array(list(self._row.values()), np.intp)
        self._to = np.array([_COLUMN[name] for name in self._row], np.intp)

    def match(self, events: Events, which: Index) -> Matched:
        """The events of this layout among those chosen, which all must be summaries."""
        starts = events.starts[which]
        begin, ok = self._tile(events, starts, events.ends[which])
        sizes = begin[1:] - begin[:-1]
        sizes -= self._key_bytes + (_AROUND_KEY - 1)
        begin = begin[:-1]
        ok &= (events.bytes.take(begin + (self._key_bytes + 5)) == sizes.astype(np.uint8)).all(axis=0)
        raw, same = self._compare(events, begin)
        ok &= same
        values, fine = self._values(raw, sizes.view(np.uint64))
        ok &= fine
        unix_ns = events.words[starts + 1]
        ok &= unix_ns - _UNIX_MIN <= _UNIX_SPAN
        return self._rows(values.view(np.int64), unix_ns.view(np.int64), ok, which)

    def _tile(self, events: Events, starts: Index, ends: Index) -> tuple[Index, Mask]:
        """Where each attribute begins (and the last ends), and whether it ends with its event."""
        at = np.empty((self._n + 1, len(starts)), np.intp)
        np.add(starts, _BODY_AT, out=at[0])
        length = np.empty(len(starts), np.uint8)
        for attribute in range(self._n):  # tag and length of those before are left out of ``at``, and come in the end
            events.bytes[2 * attribute + 1 :].take(at[attribute], mode="clip", out=length)
            np.add(at[attribute], length, out=at[attribute + 1])
        at += self._passed
        ok = at[-1] == ends
        if not ok.all():  # a wrong length may lead anywhere, but not further than the padding allows
            np.minimum(at, events.ends[-1], out=at)
        return at, ok

    def _compare(self, events: Events, begin: Index) -> tuple[U64, Mask]:
        """The 8 bytes of each value, and whether all else in an event is as it has to be."""
        at = np.empty((begin.shape[1], self._n), np.intp)
        np.add(begin.T, self._piece_at, out=at)
        pieces = events.pieces(self._piece)[at].view(np.uint64)
        raw = pieces.reshape(len(at), self._n, -1)[:, :, self._value_word].T.copy()
        pieces &= self._mask
        same: Mask = (pieces == self._constant).all(axis=1)
        return raw, same

    def _values(self, raw: U64, sizes: U64) -> tuple[U64, Mask]:
        """Varints to integers, eight bytes at once; doubles stay the bits they are, whose order is theirs from 0 on."""
        fine: Mask = sizes - self._size_min <= self._size_span
        size = sizes.view(np.int64)
        values = raw & _LOW_BYTES.take(size, mode="clip")
        fine &= ((values & _CONTINUE) == _CONTINUED.take(size, mode="clip")) | self._double
        doubles = values[self._doubles]
        values &= ~_CONTINUE
        _squeeze(values, 1)
        wide = (size.max(axis=1) > _TWO_BYTES) & ~self._double[:, 0]
        if wide.any():
            some = values[wide]
            _squeeze(some, 2)
            _squeeze(some, 4)
            values[wide] = some
        values[self._doubles] = doubles
        fine &= values <= self._limit
        every: Mask = np.logical_and.reduce(fine, axis=0)
        return values, every

    def _rows(self, values: NDArray[np.int64], unix_ns: NDArray[np.int64], ok: Mask, which: Index) -> Matched:
        row = self._row
        ok &= values[row["ts_end_ns"]] >= values[row["ts_start_ns"]]
        ok &= values[row["prefill_tokens"]] + values[row["decode_tokens"]] == values[row["scheduled_tokens"]]
        ok &= values[row["kv_blocks_free"]] <= values[row["kv_blocks_total"]]
        good = np.flatnonzero(ok)
        rows = np.full((len(good), len(STEP_FIELDS)), MISSING, np.int64)
        rows[:, self._to] = values[self._from[:, None], good].T
        rows[:, _COLUMN["unix_ns"]] = unix_ns[good]
        return Matched(which[good], rows)


def _squeeze(values: U64, bits: int) -> None:
    """Close the gaps of ``bits`` bits between the halves of each lane, in place."""
    low, high, shift = _SQUEEZES[bits]
    upper = values & high
    upper >>= shift
    values &= low
    values |= upper


def _piece(key: bytes, tag: int, size: int) -> tuple[bytes, bytes]:
    """What an attribute holds up to its value, right-aligned in ``size`` bytes, then the value; and its mask."""
    constant = bytes([_TAG_ATTRIBUTE, 0, _TAG_KEY, len(key)]) + key + bytes([_TAG_VALUE, 0, tag])
    mask = b"\xff\x00\xff\xff" + b"\xff" * len(key) + b"\xff\x00\xff"
    return constant.rjust(size, b"\0") + bytes(_WORD), mask.rjust(size, b"\0") + bytes(_WORD)


def _limit(field: words.Field | None) -> int:
    """Largest good value as bits: non-negative doubles compare as their bits do, and what is not finite is larger."""
    if field is None:
        return _ANYTHING
    return struct.unpack("<Q", struct.pack("<d", field.limit))[0] if field.double else field.limit
