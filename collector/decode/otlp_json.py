"""OTLP/JSON, as exporters send it and the OpenTelemetry Collector's file exporter writes it, to OTLP protobuf.

OTLP's JSON is not protobuf's: trace and span ids are hexadecimal, enums are numbers (names are taken, too, as the
Collector does), 64-bit integers may be strings, keys are lowerCamelCase and unknown ones are ignored (OTLP
specification, "JSON Protobuf Encoding"). So it is read into typed records and written as protobuf, and everything
behind this point is the same for both encodings.

An object takes a hundred times its two braces in memory. Who reads from strangers bounds their number beforehand.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import (
    AnyValue,
    ArrayValue,
    InstrumentationScope,
    KeyValue,
    KeyValueList,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

Integer = int | str
Number = float | str


class _Record(msgspec.Struct, rename="camel", gc=False):
    """A JSON object; unknown keys are ignored, as OTLP wants it."""


class _Values(_Record, rename="camel"):
    values: list[_Value] = []


class _Pairs(_Record, rename="camel"):
    values: list[_Pair] = []


class _Value(_Record, rename="camel"):
    string_value: str | None = None
    int_value: Integer | None = None
    double_value: Number | None = None
    bool_value: bool | None = None
    bytes_value: str | None = None
    array_value: _Values | None = None
    kvlist_value: _Pairs | None = None


class _Pair(_Record, rename="camel"):
    key: str = ""
    value: _Value | None = None


class _Event(_Record, rename="camel"):
    time_unix_nano: Integer = 0
    name: str = ""
    attributes: list[_Pair] = []
    dropped_attributes_count: int = 0


class _Status(_Record, rename="camel"):
    message: str = ""
    code: int | str = 0


class _Span(_Record, rename="camel"):
    trace_id: str = ""
    span_id: str = ""
    parent_span_id: str = ""
    flags: int = 0
    name: str = ""
    kind: int | str = 0
    start_time_unix_nano: Integer = 0
    end_time_unix_nano: Integer = 0
    attributes: list[_Pair] = []
    dropped_attributes_count: int = 0
    events: list[_Event] = []
    dropped_events_count: int = 0
    status: _Status | None = None


class _Scope(_Record, rename="camel"):
    name: str = ""
    version: str = ""
    attributes: list[_Pair] = []


class _ScopeSpans(_Record, rename="camel"):
    scope: _Scope | None = None
    spans: list[_Span] = []


class _Resource(_Record, rename="camel"):
    attributes: list[_Pair] = []


class _ResourceSpans(_Record, rename="camel"):
    resource: _Resource | None = None
    scope_spans: list[_ScopeSpans] = []


class _Export(_Record, rename="camel"):
    resource_spans: list[_ResourceSpans] = []


_decoder = msgspec.json.Decoder(_Export)


class TooManyObjects(ValueError):
    """More objects than may be read."""


def json_to_protobuf(text: bytes, objects_max: int | None = None) -> bytes:
    """One JSON export as a serialised ExportTraceServiceRequest.

    Raises:
        TooManyObjects: it may hold more than ``objects_max`` objects; a brace within a string counts as one.
        ValueError: it is no export.
    """
    if objects_max is not None and text.count(b"{") > objects_max:
        raise TooManyObjects(f"more than {objects_max} objects")
    try:
        export = _decoder.decode(text)
        request = ExportTraceServiceRequest(resource_spans=[_resource_spans(item) for item in export.resource_spans])
        return request.SerializeToString()
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not OTLP/JSON: {error}") from None


def _resource_spans(item: _ResourceSpans) -> ResourceSpans:
    attributes = item.resource.attributes if item.resource else []
    return ResourceSpans(
        resource=Resource(attributes=[_pair(pair) for pair in attributes]),
        scope_spans=[_scope_spans(scope) for scope in item.scope_spans],
    )


def _scope_spans(item: _ScopeSpans) -> ScopeSpans:
    scope = item.scope or _Scope()
    return ScopeSpans(
        scope=InstrumentationScope(
            name=scope.name, version=scope.version, attributes=[_pair(pair) for pair in scope.attributes]
        ),
        spans=[_span(span) for span in item.spans],
    )


def _span(item: _Span) -> Span:
    return Span(
        trace_id=bytes.fromhex(item.trace_id),
        span_id=bytes.fromhex(item.span_id),
        parent_span_id=bytes.fromhex(item.parent_span_id),
        flags=item.flags,
        name=item.name,
        kind=_number(item.kind, Span.SpanKind),
        start_time_unix_nano=int(item.start_time_unix_nano),
        end_time_unix_nano=int(item.end_time_unix_nano),
        attributes=[_pair(pair) for pair in item.attributes],
        dropped_attributes_count=item.dropped_attributes_count,
        events=[_event(event) for event in item.events],
        dropped_events_count=item.dropped_events_count,
        status=Status(message=item.status.message, code=_number(item.status.code, Status.StatusCode))
        if item.status
        else None,
    )


def _number(value: int | str, enum: Any) -> Any:
    return enum.Value(value) if isinstance(value, str) else value


def _event(item: _Event) -> Span.Event:
    return Span.Event(
        time_unix_nano=int(item.time_unix_nano),
        name=item.name,
        attributes=[_pair(pair) for pair in item.attributes],
        dropped_attributes_count=item.dropped_attributes_count,
    )


def _pair(item: _Pair) -> KeyValue:
    return KeyValue(key=item.key, value=_value(item.value) if item.value else None)


def _value(item: _Value) -> AnyValue:  # noqa: PLR0911 -- one for each kind of value
    if item.int_value is not None:
        return AnyValue(int_value=int(item.int_value))
    if item.string_value is not None:
        return AnyValue(string_value=item.string_value)
    if item.double_value is not None:
        return AnyValue(double_value=float(item.double_value))
    if item.bool_value is not None:
        return AnyValue(bool_value=item.bool_value)
    if item.bytes_value is not None:
        return AnyValue(bytes_value=base64.b64decode(item.bytes_value))
    if item.array_value is not None:
        return AnyValue(array_value=ArrayValue(values=[_value(value) for value in item.array_value.values]))
    if item.kvlist_value is not None:
        return AnyValue(kvlist_value=KeyValueList(values=[_pair(pair) for pair in item.kvlist_value.values]))
    return AnyValue()
