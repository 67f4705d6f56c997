"""Stamps of a recording, made anew: moved to another time, or as a slower machine would have written them.

Wall clock and monotonic clock are treated alike, so that what was measured between two stamps stays one interval. A
recording that is sent again has other ids, too: a request is known by its id for longer than a round takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

MONOTONIC_NS_KEYS = frozenset(
    {"step.ts_start_ns", "step.ts_end_ns", "step.ts_output_ns", "step.ts_done_ns", "ts.monotonic_ns"}
)
MONOTONIC_S_KEYS = frozenset({"ts.monotonic", "event.ts.monotonic"})
"""Attributes that carry a monotonic stamp: integer nanoseconds, double seconds."""

REQUEST_ID_KEYS = frozenset({"gen_ai.request.id", "request.id"})
_REQUEST_DIGITS = re.compile(r"(?<=-)[0-9a-f]{4}(?=[0-9a-f]{12})")


class Stamps(Protocol):
    """What becomes of a stamp of either clock."""

    def unix_of(self, unix_ns: int) -> int:
        """A stamp of the wall clock."""

    def mono_of(self, mono_ns: int) -> int:
        """A stamp of the monotonic clock."""

    def mono_s_of(self, mono_s: float) -> float:
        """The same in seconds."""


class Shift(NamedTuple):
    """All stamps of a clock moved by one constant: every interval is what was measured."""

    unix_ns: int
    mono_ns: int

    def unix_of(self, unix_ns: int) -> int:
        """A stamp of the wall clock."""
        return unix_ns + self.unix_ns

    def mono_of(self, mono_ns: int) -> int:
        """A stamp of the monotonic clock."""
        return mono_ns + self.mono_ns

    def mono_s_of(self, mono_s: float) -> float:
        """The same in seconds."""
        return mono_s + self.mono_ns / 1e9


class Slowdown(NamedTuple):
    """From one moment on, given by either clock, everything takes ``factor`` times as long."""

    unix_ns: int
    mono_ns: int
    factor: float

    def unix_of(self, unix_ns: int) -> int:
        """A stamp of the wall clock."""
        return unix_ns + self._later_by(unix_ns - self.unix_ns)

    def mono_of(self, mono_ns: int) -> int:
        """A stamp of the monotonic clock."""
        return mono_ns + self._later_by(mono_ns - self.mono_ns)

    def mono_s_of(self, mono_s: float) -> float:
        """The same in seconds."""
        return mono_s + max(mono_s - self.mono_ns / 1e9, 0.0) * (self.factor - 1.0)

    def _later_by(self, since_ns: int) -> int:
        return round(max(since_ns, 0) * (self.factor - 1.0))


def spans_of(request: ExportTraceServiceRequest) -> Iterator[Span]:
    """Every span of an export."""
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            yield from scope.spans


def restamp(request: ExportTraceServiceRequest, stamps: Stamps) -> None:
    """Change every stamp of an export in place."""
    for span in spans_of(request):
        span.start_time_unix_nano = stamps.unix_of(span.start_time_unix_nano)
        span.end_time_unix_nano = stamps.unix_of(span.end_time_unix_nano)
        for attribute in span.attributes:
            _restamp_attribute(attribute, stamps)
        for event in span.events:
            event.time_unix_nano = stamps.unix_of(event.time_unix_nano)
            for attribute in event.attributes:
                _restamp_attribute(attribute, stamps)


def restamped(payload: bytes, *each: Stamps) -> bytes:
    """An export with its stamps changed by each in turn."""
    request = ExportTraceServiceRequest.FromString(payload)
    for stamps in each:
        restamp(request, stamps)
    return request.SerializeToString()


def renamed(payload: bytes, salt: int) -> bytes:
    """An export whose requests, traces and spans have other ids, the same ones wherever they are named."""
    request = ExportTraceServiceRequest.FromString(payload)
    for span in spans_of(request):
        span.trace_id = _salted(span.trace_id, salt)
        span.span_id = _salted(span.span_id, salt)
        span.parent_span_id = _salted(span.parent_span_id, salt)
        for attributes in (span.attributes, *(event.attributes for event in span.events)):
            for attribute in attributes:
                if attribute.key in REQUEST_ID_KEYS:
                    attribute.value.string_value = _salted_request(attribute.value.string_value, salt)
    return request.SerializeToString()


def _salted(known: bytes, salt: int) -> bytes:
    return (int.from_bytes(known[:2], "big") ^ salt).to_bytes(2, "big") + known[2:] if known else known


def _salted_request(known: str, salt: int) -> str:
    """The digits after ``cmpl-``, which what a server appends leaves as they are."""
    return _REQUEST_DIGITS.sub(lambda digits: f"{int(digits[0], 16) ^ salt:04x}", known, count=1)


def _restamp_attribute(attribute: KeyValue, stamps: Stamps) -> None:
    if attribute.key in MONOTONIC_NS_KEYS:
        attribute.value.int_value = stamps.mono_of(attribute.value.int_value)
    elif attribute.key in MONOTONIC_S_KEYS:
        attribute.value.double_value = stamps.mono_s_of(attribute.value.double_value)
