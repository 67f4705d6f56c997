"""Spans of scopes that nobody here knows: counted and left out before an export is parsed in full.

A sidecar beside other instrumentation gets mostly those. What they hold is not looked at, not even whether it decodes.
Of an export that holds no others the receiver takes them out, and what is said beside them enters the queue: whether
that decodes, and what it counts for, is for the worker to say. Between others the worker leaves them out.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from collector.telemetry import Counts, Skip, table

from . import vocabulary as words
from .envelope import MergedExport, MergedSpans, OutlineExport, SlimExport

_KNOWN_PREFIX: Final = b"vllm."
"""So begin all scopes that are known, and so do the facts of a resource."""
_LOOK_BYTES: Final = 1024
"""Where it occurs that early, nobody looks for foreign spans alone: exports of steps need not pay for that."""


class ForeignSpans(NamedTuple):
    """What was left out of an export."""

    spans: int = 0
    events: int = 0
    dropped_events: int = 0
    scopes: frozenset[str] = frozenset()

    def add_to(self, counts: Counts) -> None:
        """Count them as if each had been read and skipped."""
        if self.spans:
            counts[table.DECODED_SPANS] += self.spans
            counts[table.DECODED_EVENTS] += self.events
            counts[table.SDK_DROPPED_EVENTS] += self.dropped_events
            counts[table.SKIPPED_SPANS, Skip.FOREIGN_SCOPE] += self.spans
            counts[table.SKIPPED_EVENTS, Skip.FOREIGN_SCOPE] += self.events


class Envelope(NamedTuple):
    """An export whose tags and lengths are right."""

    spans: int
    payload: bytes
    """As it came, or without its spans if all are foreign."""
    foreign: ForeignSpans = ForeignSpans()
    """What is no longer in the payload, but for the scopes, which are."""


def read_envelope(payload: bytes) -> Envelope:
    """How many spans an export holds, and what of it is to be read.

    Raises:
        DecodeError: it is no export.
    """
    if payload.find(_KNOWN_PREFIX, 0, _LOOK_BYTES) < 0:
        envelope = _without_spans(payload)
        if envelope is not None:
            return envelope
    spans = 0
    for scope_spans in _scopes(SlimExport.FromString(payload)):
        spans += len(scope_spans.items)
    return Envelope(spans, payload)


def _scopes(export: Any) -> list[Any]:
    """Of all resources; by slices, since an iteration over what protobuf repeats ends by an exception."""
    scopes: list[Any] = []
    for resource in export.items[:]:
        scopes += resource.items[:]
    return scopes


def _without_spans(payload: bytes) -> Envelope | None:
    """What is left of an export of foreign spans; None if there are others, or to count these takes a closer look."""
    spans = 0
    export = OutlineExport.FromString(payload)
    for scope_spans in _scopes(export):
        if scope_spans.scope.name in words.KNOWN_SCOPES:
            return None
        spans += len(scope_spans.items)
        scope_spans.ClearField("items")
    if not spans:
        return Envelope(0, payload)
    try:
        merged = MergedExport.FromString(payload).items.items.span
    except DecodeError:
        return None
    if merged.dropped_events:  # a span that says it twice means the last
        return None
    return Envelope(spans, export.SerializeToString(), ForeignSpans(spans, len(merged.events)))


def take_foreign_spans(export: Any) -> ForeignSpans:
    """Take them out of a parsed SlimExport; their scopes stay, without spans."""
    spans = events = dropped_events = 0
    scopes = set()
    for resource in export.items:
        for scope_spans in resource.items:
            name = scope_spans.scope.name
            if name in words.KNOWN_SCOPES:
                continue
            scopes.add(name)
            if scope_spans.items:
                spans += len(scope_spans.items)
                try:
                    merged = MergedSpans.FromString(scope_spans.SerializeToString()).span
                except DecodeError:  # what is no number where one should stand may be no list of numbers either
                    events += sum(len(span.events) for span in scope_spans.items)
                    dropped_events += sum(span.dropped_events for span in scope_spans.items)
                else:
                    events += len(merged.events)
                    if merged.dropped_events:
                        dropped_events += sum(span.dropped_events for span in scope_spans.items)
                scope_spans.ClearField("items")
    return ForeignSpans(spans, events, dropped_events, frozenset(scopes))
