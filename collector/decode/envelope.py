"""An export as it came, and what it holds, before it is decoded.

Who receives one counts its spans before it answers: the accounting needs the number, and bytes that do not decode are
refused. A full parse costs 0.7 µs per step event, that with the slim schema a tenth. Before anything is allocated for
an export of more than ``SMALL_BYTES``, its lengths are walked, because 8 MiB of empty spans are 4 million messages;
from ``LARGE_BYTES`` on the fields of its spans are counted, too.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from google.protobuf import message

from collector.telemetry import Outcome

from . import wire
from .wire import SlimExport

SPANS_MAX: Final = 65_536
"""Spans, scopes and resources that one export may hold; an SDK batch is 512 spans."""

FIELDS_MAX: Final = 1 << 19
"""Fields looked at; 512 spans of 128 events have 72,000."""
SMALL_BYTES: Final = 2 * SPANS_MAX
"""Two bytes are the smallest message: up to here there cannot be too many, and a batch of an SDK is rarely larger."""
LARGE_BYTES: Final = 1 << 20
"""From here on the fields inside of spans are looked at, too; below, even empty events are too few to do harm."""

_CONTAINER_TAGS: Final = tuple(number << 3 | wire.BYTES for number in (1, 2, 2, 0))
"""By depth, the tag of the repeated field below: resource_spans, scope_spans, spans, and none that is looked into."""
_DEPTH_SPANS: Final = 2


class Export(NamedTuple):
    """One admitted ExportTraceServiceRequest; ``recording`` names the file in a replay."""

    payload: bytes
    peer: str
    transport: str
    spans: int
    recording: str = ""
    seq: int = 0
    """Number in the log; 0 = not in it."""
    arrived_unix_ns: int = 0
    """When it came in, by the clock here; 0 in a replay: nobody knows."""


def newest_end_unix_nano(payload: bytes) -> int:
    """The newest end of the spans of an export that decodes; 0 without spans."""
    export = SlimExport.FromString(payload)
    ends = [span.end_unix_nano for resource in export.items for scope in resource.items for span in scope.items]
    return max(ends, default=0)


def count_spans(payload: bytes) -> int | Outcome:
    """The number of spans of a serialised ExportTraceServiceRequest, or why it is none."""
    try:
        if len(payload) <= SMALL_BYTES:
            export = SlimExport.FromString(payload)
            return sum([len(scope.items) for resource in export.items for scope in resource.items])
        walk = _Walk(payload)
        walk.run(0, len(payload), 0)
        SlimExport.FromString(payload)
    except _TooMany:
        return Outcome.TOO_LARGE
    except (IndexError, ValueError, message.DecodeError):
        return Outcome.UNDECODABLE
    return walk.spans


class _TooMany(Exception):
    """More spans or fields than are looked at."""


class _Walk:
    """From length to length, with a budget."""

    def __init__(self, data: bytes) -> None:
        self.spans = 0
        self._data = data
        self._into_spans = len(data) >= LARGE_BYTES
        self._containers_left = SPANS_MAX
        self._fields_left = FIELDS_MAX

    def run(self, at: int, end: int, depth: int) -> None:
        """Walk the fields of one message between two offsets."""
        wanted = _CONTAINER_TAGS[depth]
        counts_only = depth == _DEPTH_SPANS and not self._into_spans
        data = self._data
        while at < end:
            self._fields_left -= 1
            if self._fields_left < 0:
                raise _TooMany
            tag, body_at, at = wire.read_field(data, at)
            if at > end or tag & 7 in wire.GROUP:
                raise ValueError("a group, or a field that leaves its message")
            if tag != wanted:
                continue
            if counts_only and self._containers_left > 0:
                self._containers_left -= 1
                self.spans += 1
            else:
                self._enter(body_at, at, depth)

    def _enter(self, at: int, stop: int, depth: int) -> None:
        self._containers_left -= 1
        if self._containers_left < 0:
            raise _TooMany
        if depth == _DEPTH_SPANS:
            self.spans += 1
        elif depth > _DEPTH_SPANS:
            raise ValueError("a field without a number")  # only that is entered here: nothing is wanted inside of spans
        if depth < _DEPTH_SPANS or self._into_spans:
            self.run(at, stop, depth + 1)
