"""Step summaries to columns, hundreds at a time; the same result as the plain decoder at a tenth of its cost.

    bytes ─► slim parse ─► events of step spans ─► templates ─► rows
                 │                                    │ no match              │
                 └── all the rest ◄───────────────────┘ ─► full parse ─► plain decoder ─► Telemetry

An event is taken out of its export only if its bytes are those of a known layout and its values pass every check, so
that the plain decoder would have accepted it; whatever stays is the plain decoder's, including the verdict that the
export does not decode at all. Layouts are read off the stream itself: any event is its own layout's definition.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from . import plain
from . import vocabulary as words
from .envelope import SlimExport
from .records import STEP_DTYPE, Tally, Telemetry
from .template import COLUMNS, EVENT_MAX, Events, Index, Matched, Shape, Template, shape

CHUNK: Final = 512
"""Events compared at once: enough to spread numpy's cost per call, few enough to stay in a core's cache."""
TEMPLATES_MAX: Final = 8
ROUNDS_MAX: Final = 3
"""Layouts tried per chunk: a sender of ever new layouts pays the price of the plain decoder, not more."""


class Decoder:
    """Remembers layouts; what it returns does not depend on them."""

    def __init__(self) -> None:
        self._templates: OrderedDict[Shape, Template] = OrderedDict()

    def decode(
        self, payloads: Sequence[tuple[bytes, str]], admit_span: plain.AdmitSpan, tally: Tally
    ) -> list[list[Telemetry] | None]:
        """Each export and its peer as ``plain.decode`` has it, in order; None where that raises DecodeError."""
        exports = [_parse(payload) for payload, _ in payloads]
        spans = [list(_step_spans(export)) for export in exports]
        taken = self._take(list(itertools.chain.from_iterable(spans)))
        out: list[list[Telemetry] | None] = []
        for export, (_, peer), own in zip(exports, payloads, spans, strict=True):
            mine = list(itertools.islice(taken, len(own)))
            try:
                if export is None:
                    out.append(None)
                    continue
                rest = ExportTraceServiceRequest.FromString(export.SerializeToString())
            except DecodeError:
                out.append(None)
            else:
                out.append(plain.read(rest, peer, admit_span, tally, iter(mine)))
        return out

    def _take(self, spans: list[Any]) -> Iterator[plain.Taken]:
        """Take the events out of the spans that a template reads; one result per span."""
        ends = np.cumsum([len(span.events) for span in spans], dtype=np.intp)
        at, rows, left = self._match_all(_events(spans))
        first = 0
        cuts = np.searchsorted(at, ends)
        rest = iter(left)
        for span, end, cut, start in zip(spans, ends, cuts, (0, *cuts), strict=False):
            span.events.extend(itertools.islice(rest, int(end) - first - int(cut - start)))
            yield plain.Taken(at[start:cut] - first, rows[start:cut])
            first = int(end)

    def _match_all(self, events: Iterator[bytes]) -> tuple[Index, Any, list[bytes]]:
        """Places and rows of all events that match, and the others."""
        places: list[Index] = [np.empty(0, np.intp)]
        rows = [np.empty((0, COLUMNS), np.int64)]
        left: list[bytes] = []
        first = 0
        while chunk := list(itertools.islice(events, CHUNK)):
            matched = self._match(chunk)
            if len(matched.at) < len(chunk):
                stays = np.ones(len(chunk), np.bool_)
                stays[matched.at] = False
                left.extend(itertools.compress(chunk, stays))
            places.append(matched.at + first)
            rows.append(matched.rows)
            first += len(chunk)
        return np.concatenate(places), np.concatenate(rows).view(STEP_DTYPE)[:, 0], left

    def _match(self, chunk: list[bytes]) -> Matched:
        """The events of one chunk that match, in order."""
        events = Events([event if len(event) <= EVENT_MAX else b"" for event in chunk])
        todo = events.summaries()
        found: list[Matched] = []
        tried: set[Shape] = set()
        for _ in range(ROUNDS_MAX):
            if not len(todo):
                break
            layout = shape(chunk[todo[0]])
            if layout is None or layout in tried:  # the latter holds a bad value
                todo = todo[1:]
                continue
            tried.add(layout)
            matched = self._template(layout).match(events, todo)
            if len(matched.at) == len(todo) and not found:
                return matched
            found.append(matched)
            todo = np.setdiff1d(todo[1:], matched.at, assume_unique=True)
        if not found:
            return _NONE
        at = np.concatenate([matched.at for matched in found])
        order = np.argsort(at)
        return Matched(at[order], np.concatenate([matched.rows for matched in found])[order])

    def _template(self, layout: Shape) -> Template:
        template = self._templates.get(layout)
        if template is None:
            if len(self._templates) >= TEMPLATES_MAX:
                self._templates.popitem(last=False)
            template = self._templates[layout] = Template(layout)
        else:
            self._templates.move_to_end(layout)
        return template


_NONE: Final = Matched(np.empty(0, np.intp), np.empty((0, COLUMNS), np.int64))


def _parse(payload: bytes) -> Any:
    try:
        return SlimExport.FromString(payload)
    except DecodeError:
        return None


def _step_spans(export: Any) -> Iterator[Any]:
    if export is not None:
        for resource in export.items:
            for scope_spans in resource.items:
                if scope_spans.scope.name == words.STEP_SCOPE:
                    yield from scope_spans.items


def _events(spans: Iterable[Any]) -> Iterator[bytes]:
    """Their events; they are empty afterwards, so that no event is held twice."""
    for span in spans:
        events = span.events[:]
        span.ClearField("events")
        yield from events
