"""Events of request spans by their shape: each is one large integer, of which all values but its own are left out.

An event is  ``09 time[8] 12 N name[N]``  and then its attributes, K bytes of key and V of AnyValue,

    1A L   0A K key[K]   12 V   18 varint[V-1]  |  21 double[8]  |  0A S text[S]      every length below 128

Events of one kind differ in their values, and those seldom in how many bytes they take. So one of each shape is walked,
and another that is as long is compared with it in one operation, ``event & mask == constant``, in which a mask has

    tags, lengths, keys, name FF      varint 80 for each byte      text 80: ASCII, whatever it says      time, double 00

Its values then stand where they stand in the one that was walked. Numpy would want some hundred events at once
(template.py); of a server's requests a few end at a time. Whatever the plain decoder would refuse is left to it, with
the whole span.
"""

from __future__ import annotations

import abc
import struct
from collections.abc import Iterable
from typing import Final, Generic, NamedTuple, TypeVar

from . import vocabulary as words
from .records import Mark, MarkKind
from .request_spans import ApiMoment, CoreMoment, finish_of

SHAPES_MAX: Final = 256
"""Half a kB each, of the longest events ten; beyond, all are forgotten: those in use come back at once."""
WALKS_MAX: Final = 32
"""Events walked for one batch, which costs several times what the plain decoder does: ever new shapes are soon its."""
EVENT_MAX: Final = 4096
ATTRIBUTES_MAX: Final = 40
"""What is longer, or says more, has no shape."""

_TAG_TIME, _TAG_NAME, _TAG_ATTRIBUTE, _TAG_KEY, _TAG_VALUE = 0x09, 0x12, 0x1A, 0x0A, 0x12
_INT, _DOUBLE, _TEXT = 0x18, 0x21, 0x0A
_NAME_AT: Final = 11
_WORD: Final = 8
_CONTINUED: Final = 0x80
_TIME_BITS: Final = 8
_TIME_MASK: Final = (1 << 64) - 1
_KEY: Final = slice(9, 20)
"""Where events of different names differ."""
_LANES: Final = len(words.JOURNEY_FIELDS)
_LANE: Final = sum(1 << 64 * lane for lane in range(_LANES))
_SQUEEZES: Final = (
    (1, 0x007F007F007F007F * _LANE, 0x7F007F007F007F00 * _LANE),
    (2, 0x00003FFF00003FFF * _LANE, 0x3FFF00003FFF0000 * _LANE),
    (4, 0x000000000FFFFFFF * _LANE, 0x0FFFFFFF00000000 * _LANE),
)
"""Bits to the right, what stays and what moves: the gaps between the bytes of a varint are closed in three steps, for
all numbers of an event at once, each in a lane of 64 bits."""
_NUMBERS: Final = struct.Struct(f"<{_LANES}Q")
_TOO_LARGE: Final = sum(
    (1 << 64) - (1 << (field.limit + 1).bit_length() - 1) << 64 * lane
    for lane, field in enumerate(words.JOURNEY_FIELDS.values())
)
"""Bits of numbers that are beyond their limit, or nearly."""

Moment = TypeVar("Moment")


class _Value(NamedTuple):
    """Where an attribute's value stands."""

    tag: int
    at: int
    stop: int


class Shape(NamedTuple):
    """What an event looks like: its name, where the value of each key stands, and the bits that are no value's."""

    name: str
    values: dict[str, _Value]
    mask: int


def _shape(event: bytes) -> Shape | None:
    """The shape of an event, None if it is not of the form above, or says something twice."""
    end, mask = len(event), bytearray(b"\xff" * len(event))
    try:
        at = _NAME_AT + event[_NAME_AT - 1]
        name = event[_NAME_AT:at]
        if (event[0], event[_NAME_AT - 2]) != (_TAG_TIME, _TAG_NAME) or len(name) >= _CONTINUED or not name.isascii():
            return None
        mask[1:9] = bytes(_WORD)
        values: dict[str, _Value] = {}
        while at < end:
            key, value = event[at + 4 : at + 4 + event[at + 3]], _value(event, at)
            if value is None or not key.isascii() or key.decode() in values or len(values) == ATTRIBUTES_MAX:
                return None
            width = value.stop - value.at
            mask[value.at : value.stop] = bytes(_WORD) if value.tag == _DOUBLE else bytes([_CONTINUED] * width)
            values[key.decode()] = value
            at = value.stop
    except IndexError:
        return None
    return Shape(name.decode(), values, int.from_bytes(mask, "little")) if at == end else None


def _value(event: bytes, at: int) -> _Value | None:
    """The value of the attribute that begins at ``at``, if all of its lengths say the same."""
    tag_at, stop = at + 6 + event[at + 3], at + 2 + event[at + 1]
    tags = (event[at], event[at + 2], event[tag_at - 2])
    lengths = (event[at + 1], event[at + 3], event[tag_at - 1])
    if tags != (_TAG_ATTRIBUTE, _TAG_KEY, _TAG_VALUE) or max(lengths) >= _CONTINUED or lengths[2] != stop - tag_at:
        return None
    tag, value = event[tag_at], event[tag_at + 1 : stop]
    if len(event) < stop:
        return None
    if tag == _TEXT:
        return _Value(tag, tag_at + 2, stop) if value and value[0] == len(value) - 1 and value.isascii() else None
    if tag == _DOUBLE:
        return _Value(tag, tag_at + 1, stop) if len(value) == _WORD else None
    ends = 1 <= len(value) <= _WORD and value[-1] < _CONTINUED and min(value[:-1], default=_CONTINUED) >= _CONTINUED
    return _Value(tag, tag_at + 1, stop) if tag == _INT and ends else None


class Template(abc.ABC, Generic[Moment]):
    """An event without its values."""

    def __init__(self, event: bytes, shape: Shape) -> None:
        self.mask = shape.mask
        self.constant = int.from_bytes(event, "little") & shape.mask

    @staticmethod
    @abc.abstractmethod
    def learnable(shape: Shape) -> bool:
        """Whether the plain decoder takes such an event if its values are good."""

    @abc.abstractmethod
    def read(self, event: bytes, bits: int) -> Moment | None:
        """What an event of this shape says, None if its values are not good; ``bits``: the event as an integer."""


class JourneyTemplate(Template[CoreMoment]):
    """Of an event of the engine core."""

    def __init__(self, event: bytes, shape: Shape) -> None:
        super().__init__(event, shape)
        self._kind = words.MARK_KINDS[shape.name]
        self._finish = shape.values.get(words.FINISH)
        self._places = [(64 * lane, *_place(shape.values[key])) for lane, key in enumerate(words.JOURNEY_FIELDS)]

    @staticmethod
    def learnable(shape: Shape) -> bool:
        """As the plain decoder wants the fields of a journey."""
        fields = [shape.values.get(key) for key in words.JOURNEY_FIELDS]
        finish = shape.values.get(words.FINISH)
        ints = all(value is not None and value.tag == _INT for value in fields)
        return shape.name in words.MARK_KINDS and ints and (finish is None or finish.tag == _TEXT)

    def read(self, event: bytes, bits: int) -> CoreMoment | None:
        """As the base class has it."""
        unix_ns = bits >> _TIME_BITS & _TIME_MASK
        if not words.UNIX_MIN <= unix_ns <= words.UNIX_MAX:
            return None
        packed = 0
        for lane, shift, keep in self._places:
            packed |= (bits >> shift & keep) << lane
        for right, stays, moves in _SQUEEZES:
            packed = packed & stays | (packed & moves) >> right
        if packed & _TOO_LARGE:
            return None
        ts_ns, step_id, output_tokens, prompt_tokens = _NUMBERS.unpack(packed.to_bytes(_NUMBERS.size, "little"))
        finish = None
        if self._kind is MarkKind.FINISHED:
            said = self._finish
            finish = finish_of(None if said is None else event[said.at : said.stop].decode())
        return CoreMoment(Mark(self._kind, step_id, ts_ns, output_tokens), prompt_tokens, unix_ns, finish)


class ApiTemplate(Template[ApiMoment]):
    """Of an event of the API server."""

    def __init__(self, event: bytes, shape: Shape) -> None:
        super().__init__(event, shape)
        self._name = words.API_MOMENTS[shape.name]
        self._at = shape.values[words.API_TIME].at

    @staticmethod
    def learnable(shape: Shape) -> bool:
        """As the plain decoder wants the moment."""
        seconds = shape.values.get(words.API_TIME)
        return shape.name in words.API_MOMENTS and seconds is not None and seconds.tag == _DOUBLE

    def read(self, event: bytes, _bits: int) -> ApiMoment | None:
        """As the base class has it."""
        seconds = _DOUBLES.unpack_from(event, self._at)[0]
        if not 0 <= seconds < words.TIME_MAX / 1e9:  # nor is what is no number
            return None
        return ApiMoment(self._name, round(seconds * 1e9))


_DOUBLES: Final = struct.Struct("<d")


def _place(value: _Value) -> tuple[int, int]:
    """Bits before a varint, and its own without those of continuation."""
    return value.at * 8, int.from_bytes(bytes([0x7F] * (value.stop - value.at)), "little")


class KnownShapes(Generic[Moment]):
    """Remembers templates; what it returns does not depend on them, but for spans that it leaves to others."""

    def __init__(self, template: type[Template[Moment]]) -> None:
        self._template = template
        self._known: dict[tuple[int, bytes], list[Template[Moment]]] = {}
        self._size = 0
        self._walks_left = WALKS_MAX

    def __len__(self) -> int:
        """How many are known."""
        return self._size

    def begin_batch(self) -> None:
        """Some more events may be walked."""
        self._walks_left = WALKS_MAX

    def read(self, events: Iterable[bytes]) -> list[Moment] | None:
        """What the events of a span say, None if the plain decoder has to look at one of them."""
        out = []
        for event in events:
            moment = self._read(event)
            if moment is None:
                return None
            out.append(moment)
        return out

    def _read(self, event: bytes) -> Moment | None:
        known = self._known.get((len(event), event[_KEY]))
        if known is None:
            return self._learn(event)
        bits = int.from_bytes(event, "little")
        for template in known:
            if bits & template.mask == template.constant:
                return template.read(event, bits)
        return self._learn(event)

    def _learn(self, event: bytes) -> Moment | None:
        if not self._walks_left or len(event) > EVENT_MAX:
            return None
        self._walks_left -= 1
        shape = _shape(event)
        if shape is None or not self._template.learnable(shape):
            return None
        if self._size >= SHAPES_MAX:
            self._known.clear()
            self._size = 0
        template = self._template(event, shape)
        self._known.setdefault((len(event), event[_KEY]), []).append(template)
        self._size += 1
        return template.read(event, int.from_bytes(event, "little"))
