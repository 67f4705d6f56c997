"""Step summaries by column, hundreds at a time; the same result as event by event at a tenth of the cost.

    bytes ─► slim parse ─► events of step spans ─► templates ─► rows
                 │                                    │ no match              │
                 └──── all the rest ◄─────────────────┘ ─► full parse ─► spans.py ─► Telemetry

An event is  ``09 time[8] 12 12 "step.BATCH_SUMMARY"``  and then per attribute, K bytes of key and V bytes of AnyValue,

    1A L   0A K key[K]   12 V   18 varint[V-1]  |  21 double[8]        L = K + V + 4, every length below 128

Consecutive steps differ in little but their values, and those seldom in how many bytes they take: of a thousand events
in a row, nearly all have one of a few shapes. So one event of each shape is walked byte by byte, a template from then
on, and of all others that are as long, every byte is compared at once with its own:

    event      09 t t t t t t t t 12 12 s t e p … 18 8D 92 03 1A … 21 d d d d d d d d …
    mask       FF 0 0 0 0 0 0 0 0 FF FF F F F F … FF 80 80 80 FF … FF 0 0 0 0 0 0 0 0 …

What passes has the same keys, types and lengths, and varints that end where those do: its values stand where they stand
in the event that was walked. Then every check of spans.py is made on them. All other events, varints beyond 8 bytes and
negative numbers among them, stay in their export and are read there, with the verdict that it does not decode at all:
here nothing is ever rejected.
"""

from __future__ import annotations

import itertools
import logging
import struct
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.telemetry import Counts

from . import vocabulary as words
from .records import MISSING, STEP_FIELDS, Telemetry
from .spans import AdmitSpan, Taken, read
from .wire import SlimExport, is_too_dense

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
    """spans.py would take such an event if its values are good: every field once, of its type."""
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
    """Whether spans.py would take them, row by row; they become rows of STEP_FIELDS in place."""
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


TEMPLATES_MAX: Final = 128
"""Some kB each; beyond, all are forgotten: those in use come back at once."""
WALKS_MAX: Final = 64
LAYOUTS_MAX: Final = 3
"""Events walked per chunk; new layouts: who sends ever new ones pays the price of single events, hardly more."""


class KnownTemplates:
    """Remembers templates; what it returns does not depend on them, but for events that it leaves to others."""

    def __init__(self) -> None:
        self._of_size: dict[int, list[Template]] = {}
        self._layouts: set[EventLayout] = set()
        self._walks_left = self._layouts_left = 0

    def __len__(self) -> int:
        """How many are known."""
        return sum(map(len, self._of_size.values()))

    def match(self, chunk: list[bytes]) -> Matched:
        """The events that a template reads; numpy's cost per call spreads over some hundred of them."""
        if len(self) >= TEMPLATES_MAX:
            self._of_size.clear()
            self._layouts.clear()
        self._walks_left, self._layouts_left = WALKS_MAX, LAYOUTS_MAX
        events = Events(chunk)
        values = np.empty((len(chunk), COLUMNS), np.uint64)
        by_size = np.argsort(events.sizes, kind="stable")
        sizes = events.sizes[by_size]
        fitting: list[tuple[Template, Index]] = []
        for some in np.split(by_size, np.flatnonzero(sizes[1:] != sizes[:-1]) + 1):
            fitting += self._match_size(chunk, events, some, values)
        fits = np.zeros(len(chunk), np.bool_)
        for _, some in fitting:
            fits[some] = True
        if fitting:
            fits &= read_values(values, fitting)
        rows = values.view(np.int64)
        return Matched(np.flatnonzero(fits), rows if fits.all() else rows[fits])

    def _match_size(
        self, chunk: list[bytes], events: Events, todo: Index, values: U64
    ) -> Iterator[tuple[Template, Index]]:
        """Events of one size by template; their values go to their rows."""
        for template in self._of_size.get(len(chunk[todo[0]]), ()):
            fits = template.fits(events, todo, values)
            yield template, todo[fits]
            todo = todo[~fits]
            if not len(todo):
                return
        todo = todo[events.are_summaries[todo]]
        while len(todo) and self._walks_left:
            learned = self._learn(chunk[todo[0]])
            if learned is None:  # what one sender says stands together: another's is met soon
                todo = todo[len(todo) // 2 + 1 :]
                continue
            fits = learned.fits(events, todo, values)
            yield learned, todo[fits]
            todo = todo[~fits]

    def _learn(self, event: bytes) -> Template | None:
        """A template of an event, known from now on."""
        self._walks_left -= 1
        found = shape(event)
        if found is None:
            return None
        if found.layout not in self._layouts:
            if not self._layouts_left or not learnable(found.layout):
                return None
            self._layouts_left -= 1
            self._layouts.add(found.layout)
        template = Template(event, found)
        self._of_size.setdefault(len(event), []).append(template)
        return template


_log = logging.getLogger(__name__)

CHUNK: Final = 1024
"""Events compared at once: enough to spread numpy's cost per call, few enough to stay in a core's cache."""
FOREIGN_SCOPES_MAX: Final = 8
SCOPE_CHARS_MAX: Final = 100


class Decoder:
    """Remembers templates; what it returns does not depend on them."""

    def __init__(self) -> None:
        self._templates = KnownTemplates()
        self.foreign_scopes: tuple[str, ...] = ()
        """The first that were seen; replaced, never edited."""

    def decode(
        self,
        payloads: Sequence[tuple[bytes, str]],
        admit_span: AdmitSpan,
        counts: Counts,
        arrived_unix_ns: Sequence[int] = (),
    ) -> list[list[Telemetry] | None]:
        """Each export and its peer as ``spans.read`` has it, in order.

        ``arrived_unix_ns``: when each came in, 0 if nobody knows; empty: nobody knows of any.
        None where that raises DecodeError, and where the rest of an export would take too much memory to parse.
        """
        exports = [_parse(payload) for payload, _ in payloads]
        spans = [_step_spans_of(export) for export in exports]
        columns = self._match_spans([span for own in spans for span in own])
        out: list[list[Telemetry] | None] = []
        arrived = arrived_unix_ns or [0] * len(payloads)
        for export, (_, peer), own, at in zip(exports, payloads, spans, arrived, strict=True):
            columns_of_export = iter(list(itertools.islice(columns, len(own))))
            remainder = _parse_remainder(export)
            if remainder is None:
                out.append(None)
                continue
            self._record_scopes(remainder)
            out.append(read(remainder, peer, admit_span, counts, columns_of_export, at))
        return out

    def _record_scopes(self, export: ExportTraceServiceRequest) -> None:
        places = FOREIGN_SCOPES_MAX - len(self.foreign_scopes)
        if not places:
            return
        scopes = {spans.scope.name for resource in export.resource_spans for spans in resource.scope_spans}
        new = {scope[:SCOPE_CHARS_MAX] for scope in scopes - words.KNOWN_SCOPES} - {*self.foreign_scopes}
        for name in sorted(new)[:places]:
            self.foreign_scopes += (name,)
            _log.info("spans of scope %r tell nothing of steps or requests: they are left out", name)

    def _match_spans(self, spans: list[Any]) -> Iterator[Taken]:
        """Take the events out of the spans that a template reads; one result per span."""
        columns = _Columns(sum(len(span.events) for span in spans))
        ends: list[int] = []
        chunk: list[bytes] = []
        first = 0
        for span in spans:
            chunk += span.events
            span.ClearField("events")  # no event is held twice
            ends.append(first + len(chunk))
            while len(chunk) >= CHUNK:
                columns.add(chunk[:CHUNK], first, self._templates.match(chunk[:CHUNK]))
                first += CHUNK
                del chunk[:CHUNK]
        if chunk:
            columns.add(chunk, first, self._templates.match(chunk))
        return _split_by_span(spans, ends, columns.matched(), iter(columns.left))


class _Columns:
    """Rows of all chunks in one array, and the events that are left, in order."""

    def __init__(self, events: int) -> None:
        self.left: list[bytes] = []
        self._at = np.empty(events, np.intp)
        self._rows = np.empty((events, len(STEP_FIELDS)), np.int64)  # pages that no row needs stay untouched
        self._size = 0

    def add(self, chunk: list[bytes], first: int, matched: Matched) -> None:
        """The result of one chunk, whose first event has place ``first``."""
        size = self._size + len(matched.at)
        self._at[self._size : size] = matched.at + first
        self._rows[self._size : size] = matched.rows
        self._size = size
        if len(matched.at) < len(chunk):
            stays = np.ones(len(chunk), np.bool_)
            stays[matched.at] = False
            self.left.extend(itertools.compress(chunk, stays))

    def matched(self) -> Matched:
        """All that was added."""
        return Matched(self._at[: self._size], self._rows[: self._size])


def _parse(payload: bytes) -> Any:
    try:
        return SlimExport.FromString(payload)
    except DecodeError:
        return None


def _parse_remainder(export: Any) -> ExportTraceServiceRequest | None:
    if export is None:
        return None
    data = export.SerializeToString()
    if is_too_dense(data):
        return None
    try:
        return ExportTraceServiceRequest.FromString(data)
    except DecodeError:
        return None


def _step_spans_of(export: Any) -> list[Any]:
    steps: list[Any] = []
    for resource in export.items if export is not None else ():
        for scope_spans in resource.items:
            if scope_spans.scope.name == words.STEP_SCOPE:
                steps += scope_spans.items
    return steps


def _split_by_span(spans: list[Any], ends: list[int], matched: Matched, left: Iterator[bytes]) -> Iterator[Taken]:
    """Each span gets the events back that did not match; its item says what is missing."""
    first = start = 0
    for span, end, stop in zip(spans, ends, np.searchsorted(matched.at, ends).tolist(), strict=True):
        if stop - start < end - first:
            span.events.extend(itertools.islice(left, end - first - (stop - start)))
        yield Taken(matched.at[start:stop] - first, matched.rows[start:stop])
        first, start = end, stop
