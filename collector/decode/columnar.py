"""Step summaries to columns, hundreds at a time; the same result as the plain decoder at a tenth of its cost.

    bytes ─► slim parse ─► events of step spans ─► templates ─► rows
                 │ │                                  │ no match              │
                 │ └── all the rest ◄─────────────────┘ ─► full parse ─► plain decoder ─► Telemetry
                 └── foreign scopes: counted, left out

Events of request spans are taken out in the same way, one by one (request_events.py), and all of a span or none.
An event is taken out of its export only if its bytes are those of a known layout and its values pass every check, so
that the plain decoder would have accepted it; whatever stays is the plain decoder's, including the verdict that the
export does not decode at all (but for what lies within foreign scopes, which nobody parses). Layouts are read off the
stream itself: any event is its own layout's definition.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.runtime import offer_turn
from collector.telemetry import Counts

from . import plain
from . import vocabulary as words
from .envelope import SlimExport
from .foreign import take_foreign_spans
from .known_templates import KnownTemplates
from .records import STEP_FIELDS, Telemetry
from .request_events import ApiTemplate, JourneyTemplate, KnownShapes, Moment
from .template import Matched
from .weight import is_too_dense

_log = logging.getLogger(__name__)

CHUNK: Final = 1024
"""Events compared at once: enough to spread numpy's cost per call, few enough to stay in a core's cache."""
FOREIGN_SCOPES_MAX: Final = 8
SCOPE_CHARS_MAX: Final = 100


class Decoder:
    """Remembers templates; what it returns does not depend on them."""

    def __init__(self) -> None:
        self._templates = KnownTemplates()
        self._journeys = KnownShapes(JourneyTemplate)
        self._api_moments = KnownShapes(ApiTemplate)
        self.foreign_scopes: tuple[str, ...] = ()
        """The first that were seen; replaced, never edited."""

    def decode(
        self,
        payloads: Sequence[tuple[bytes, str]],
        admit_span: plain.AdmitSpan,
        counts: Counts,
        arrived_unix_ns: Sequence[int] = (),
    ) -> list[list[Telemetry] | None]:
        """Each export and its peer as ``plain.read`` has it, in order.

        ``arrived_unix_ns``: when each came in, 0 if nobody knows; empty: nobody knows of any.
        None where that raises DecodeError, and where the rest of an export would take too much memory to parse.
        """
        exports = [_parse(payload) for payload, _ in payloads]
        spans = [_spans_of(export) for export in exports]
        foreign = [
            take_foreign_spans(export) if own.others else None for export, own in zip(exports, spans, strict=True)
        ]
        self._journeys.begin_batch()
        self._api_moments.begin_batch()
        columns = self._match_spans([span for own in spans for span in own.steps])
        out: list[list[Telemetry] | None] = []
        arrived = arrived_unix_ns or [0] * len(payloads)
        for export, left_out, (_, peer), own, at in zip(exports, foreign, payloads, spans, arrived, strict=True):
            offer_turn()
            columns_of_export = iter(list(itertools.islice(columns, len(own.steps))))
            core = _take_moments(own.core, self._journeys)
            api = _take_moments(own.api, self._api_moments)
            remainder = _parse_remainder(export)
            if remainder is None:
                out.append(None)
                continue
            if left_out is not None:
                left_out.add_to(counts)
                self._record_scopes(left_out.scopes)
            taken = plain.TakenOut(columns_of_export, core, api)
            out.append(plain.read(remainder, peer, admit_span, counts, taken, at))
        return out

    def _record_scopes(self, scopes: frozenset[str]) -> None:
        places = FOREIGN_SCOPES_MAX - len(self.foreign_scopes)
        new = {scope[:SCOPE_CHARS_MAX] for scope in scopes} - {*self.foreign_scopes} if places else ()
        for name in sorted(new)[:places]:
            self.foreign_scopes += (name,)
            _log.info("spans of scope %r tell nothing of steps or requests: they are left out", name)

    def _match_spans(self, spans: list[Any]) -> Iterator[plain.Taken]:
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
                offer_turn()
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


class _Spans(NamedTuple):
    """Spans of an export by their scope, in order."""

    steps: list[Any]
    core: list[Any]
    api: list[Any]
    others: bool
    """Whether there are scopes that nobody here knows."""


def _spans_of(export: Any) -> _Spans:
    steps: list[Any] = []
    core: list[Any] = []
    api: list[Any] = []
    by_scope = {words.STEP_SCOPE: steps, words.CORE_SCOPE: core, words.API_SCOPE: api}
    others = False
    for resource in export.items if export is not None else ():
        for scope_spans in resource.items:
            name = scope_spans.scope.name
            spans = by_scope.get(name)
            if spans is not None:
                spans += scope_spans.items
            elif name not in words.KNOWN_SCOPES:
                others = True
    return _Spans(steps, core, api, others)


def _take_moments(spans: list[Any], known: KnownShapes[Moment]) -> Iterator[list[Moment] | None]:
    """Take the events out of the spans of which every event is read; an item per span."""
    if not spans:
        return iter(())
    moments = [known.read(span.events) for span in spans]
    for span, read in zip(spans, moments, strict=True):
        if read is not None:
            span.ClearField("events")
    return iter(moments)


def _split_by_span(spans: list[Any], ends: list[int], matched: Matched, left: Iterator[bytes]) -> Iterator[plain.Taken]:
    """Each span gets the events back that did not match; its item says what is missing."""
    first = start = 0
    for span, end, stop in zip(spans, ends, np.searchsorted(matched.at, ends).tolist(), strict=True):
        if stop - start < end - first:
            span.events.extend(itertools.islice(left, end - first - (stop - start)))
        yield plain.Taken(matched.at[start:stop] - first, matched.rows[start:stop])
        first, start = end, stop
