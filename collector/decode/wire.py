"""Exports as bytes: bounded before they are parsed, sliced by a slim schema, read from JSON, cut by who emitted what.

A receiver counts the spans of an export before it answers: the accounting needs the number, and bytes that do not
decode are refused. Parsing with the full schema costs 1.5 µs per step event, with the slim one a tenth. Fields that a
schema does not name stay in the message as unknown fields, and are written again when it is serialised.

Before a large input is parsed, the messages that a parse of what is read would allocate are counted. Two bytes on the
wire are enough for an empty message, up to 150 in memory: 32 MiB would become more than two gigabytes. Real telemetry
has 14 bytes a message. Only large inputs are counted, a third of a microsecond per attribute.
"""

from __future__ import annotations

import base64
from collections.abc import Container, Iterator
from typing import Any, Final, NamedTuple

import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from collector.telemetry import Outcome

from . import vocabulary as words

SPANS_MAX: Final = 65_536
"""Spans, scopes and resources that one export may hold; an SDK batch is 512 spans."""
SMALL_BYTES: Final = 2 * SPANS_MAX
"""Two bytes are the smallest message: up to here there cannot be too many, and a batch of an SDK is rarely larger."""
LARGE_BYTES: Final = 1 << 20
"""From here on messages and fields are counted; below, even the densest input costs less than 80 MB."""
_BYTES_PER_MESSAGE: Final = 10
_MESSAGES_MAX: Final = 1 << 21
"""A full batch of the SDK, 512 spans of 100 events of 16 attributes in 24 MB, has 1.7 million."""
_BYTES_PER_FIELD: Final = 5
"""Telemetry has 7 bytes a field; this bounds the time spent here."""


class Export(NamedTuple):
    """One admitted ExportTraceServiceRequest; ``recording`` names the file in a replay."""

    payload: bytes
    peer: str
    spans: int
    recording: str = ""
    seq: int = 0
    """Number in the log; 0 = not in it."""
    arrived_unix_ns: int = 0
    """Arrival by the clock here; 0 in a replay."""


def read_span_ends(payload: bytes) -> list[int] | Outcome:
    """When each span of a serialised ExportTraceServiceRequest ended, in unix ns, or why it is none."""
    try:
        if len(payload) > SMALL_BYTES and _is_more(payload, _SPANS, SPANS_MAX, len(payload)):
            return Outcome.TOO_LARGE
        if len(payload) >= LARGE_BYTES and is_too_dense(payload):
            return Outcome.TOO_LARGE
        resources = SlimExport.FromString(payload).resource_spans
    except (IndexError, ValueError, DecodeError):
        return Outcome.UNDECODABLE
    return [span.end_time_unix_nano for each in resources for scope in each.scope_spans for span in scope.spans]


# --- how dense an export is -------------------------------------------------------------------------------------------

VARINT, I64, BYTES, I32 = 0, 1, 2, 5
_FIXED_BYTES: Final = {I64: 8, I32: 4}
_LAST: Final = 0x80
"""A byte below this value ends a varint."""
_SHIFT_MAX: Final = 63
"""A varint has at most ten bytes."""

Table = dict[int, Any]
"""Message tables by the tag of their field."""

_SPANS: Final[Table] = {1 << 3 | BYTES: {2 << 3 | BYTES: {2 << 3 | BYTES: {}}}}
"""From resources over scopes to spans, which are not looked into."""
_ATTRIBUTE: Final[Table] = {}
"""An attribute counts with its value, which a map makes where none was sent; what else it has is not parsed."""


def is_too_dense(data: bytes) -> bool:
    """Whether an export holds far more messages or fields for its size than telemetry does.

    Raises:
        IndexError, ValueError: it is no message, or has a group: deprecated since 2008, and in no schema read here.
    """
    return _is_more(
        data, _READ_TABLE, min(len(data) // _BYTES_PER_MESSAGE, _MESSAGES_MAX), len(data) // _BYTES_PER_FIELD
    )


def _is_more(data: bytes, table: Table, messages: int, fields: int) -> bool:
    """Whether an export has more messages that a table knows, or more fields in those that are looked into."""
    todo = [(0, len(data), table)]
    while todo:
        at, end, known = todo.pop()
        while at < end:
            # numbers of one byte are read without a call, which halves the time
            tag, at = (data[at], at + 1) if data[at] < _LAST else _read_varint(data, at)
            body_at, kind, inner = at, tag & 7, known.get(tag)
            if kind == BYTES:
                length, body_at = (data[at], at + 1) if data[at] < _LAST else _read_varint(data, at)
                at = body_at + length
            elif kind == VARINT:
                at = at + 1 if data[at] < _LAST else _read_varint(data, at)[1]
            elif kind in _FIXED_BYTES:
                at += _FIXED_BYTES[kind]
            else:
                raise ValueError("an unknown wire type")
            if at > end:
                raise ValueError("a field that leaves its message")
            fields -= 1
            if inner is not None:
                messages -= 2 if inner is _ATTRIBUTE else 1
                if inner and at > body_at:
                    todo.append((body_at, at, inner))
            if messages < 0 or fields < 0:
                return True
    return False


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Value, and where the next field begins; IndexError where the data end before it does."""
    value = shift = 0
    while shift <= _SHIFT_MAX:
        byte = data[at]
        at += 1
        if byte < _LAST:
            return value | byte << shift, at
        value |= (byte & 0x7F) << shift
        shift += 7
    raise ValueError("a varint without an end")


def _table(descriptor: Any) -> Table:
    messages = ((field.number << 3 | BYTES, field.message_type) for field in descriptor.fields if field.message_type)
    return {tag: _ATTRIBUTE if each.GetOptions().map_entry else _table(each) for tag, each in messages}


# --- schemas: subsets of OTLP's ---------------------------------------------------------------------------------------

_SLIM: Final = frozenset(
    ("resource_spans", "scope_spans", "scope", "name", "spans", "span_id", "parent_span_id", "end_time_unix_nano")
)
_READ: Final = _SLIM.union(
    ("resource", "attributes", "trace_id", "start_time_unix_nano", "events", "time_unix_nano", "dropped_events_count"),
    ("string_value", "bool_value", "int_value", "double_value"),
)
_MESSAGES: Final = (
    *(ExportTraceServiceRequest, ResourceSpans, Resource, ScopeSpans, InstrumentationScope),
    *(Span, Span.Event, AnyValue),
)
_NOT_SENT: Final = {"int_value": str(words.MISSING), "double_value": "nan"}


def _export_class(names: Container[str]) -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="tracefit.proto",
        package="tracefit",
        syntax="editions",
        edition=descriptor_pb2.EDITION_2023,
        message_type=[_message(of, names) for of in _MESSAGES],
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tracefit.ExportTraceServiceRequest"))


def _message(of: Any, names: Container[str]) -> descriptor_pb2.DescriptorProto:
    """Schema of a message, reduced to the fields with these names.

    Attributes become a map, which is the same on the wire as a list of keys and values, and finds a value by its key.
    """
    whole = descriptor_pb2.DescriptorProto()
    of.DESCRIPTOR.CopyToProto(whole)
    message = descriptor_pb2.DescriptorProto(
        name=whole.name, field=[each for each in whole.field if each.name in names]
    )
    for field in message.field:
        field.ClearField("oneof_index")
        if field.name in _NOT_SENT:
            field.default_value = _NOT_SENT[field.name]
        if field.name == "attributes":
            entry = _message(KeyValue, ("key", "value"))
            entry.options.map_entry, entry.name = True, "AttributesEntry"
            message.nested_type.append(entry)
            field.type_name = f"{whole.name}.AttributesEntry"
        elif field.type_name:
            field.type_name = field.type_name.rpartition(".")[2]
    return message


SlimExport: Final = _export_class(_SLIM)
"""Schema of spans with their ids and ends; all other fields stay unparsed."""
ReadExport: Final = _export_class(_READ)
"""Schema of what is read of an export. An integer that was not sent, or has another type, is MISSING; a double NaN."""
_READ_TABLE: Final = _table(ReadExport.DESCRIPTOR)

# --- OTLP/JSON --------------------------------------------------------------------------------------------------------


_JSON: Final = msgspec.json.Decoder(dict[str, Any])
_HEX_IDS: Final = ("traceId", "spanId", "parentSpanId")


_JSON_VALUES_MAX: Final = 1 << 19
"""512 spans of 128 events have a hundred thousand objects, each with a few values."""


def has_too_many_values(text: bytes) -> bool:
    """Whether a JSON text holds far more values than telemetry does, by its braces, brackets and commas."""
    return text.count(b"{") + text.count(b"[") + text.count(b",") > _JSON_VALUES_MAX


def json_to_protobuf(text: bytes) -> bytes:
    """One export in OTLP's JSON as a serialised ExportTraceServiceRequest; ValueError if it is none.

    It is protobuf's JSON but for trace and span ids, which are hexadecimal (OTLP specification, "JSON Protobuf
    Encoding"). A value takes up to a hundred times its bytes in memory: who reads from strangers counts them before.
    """
    try:
        document = _JSON.decode(text)
        for resource in document.get("resourceSpans") or ():
            for scope in resource.get("scopeSpans") or ():
                for span in scope.get("spans") or ():
                    for owner in (span, *(span.get("links") or ())):
                        for name in _HEX_IDS:
                            if name in owner:
                                owner[name] = base64.b64encode(bytes.fromhex(owner[name])).decode()
        request = ExportTraceServiceRequest()
        json_format.ParseDict(document, request, ignore_unknown_fields=True)
        return request.SerializeToString()
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError, json_format.ParseError) as error:
        raise ValueError(f"not OTLP/JSON: {error}") from None


# --- an export cut by who emitted what, without decoding it -----------------------------------------------------------


class Part(NamedTuple):
    """The part of an export that one resource sends to one kind of reader.

        export ─┬─ resource a ─┬─ steps, journeys, requests, any other scope   ─►  a   an export of its own
                │              └─ API spans                                   ─►  a   the same resource again
                └─ resource b …

    API spans are needed where the requests are whose parents they are, which ``ids`` tell: of API spans their own, of
    journeys those of their parents.
    """

    is_api: bool
    instance: str
    payload: bytes
    ids: frozenset[bytes]


def parts_by_emitter(payload: bytes, peer: str) -> list[Part]:
    """The parts of a serialised ExportTraceServiceRequest, in its order; ``peer`` names who has no name.

    Raises:
        ValueError: it does not decode.
    """
    try:
        return [
            part for resource in SlimExport.FromString(payload).resource_spans for part in _parts_of(resource, peer)
        ]
    except DecodeError as error:
        raise ValueError(f"no export: {error}") from None


def _parts_of(resource: Any, peer: str) -> Iterator[Part]:
    scopes = [*resource.scope_spans]
    resource.ClearField("scope_spans")
    common = resource.SerializeToString()
    (read,) = ReadExport.FromString(SlimExport(resource_spans=[resource]).SerializeToString()).resource_spans
    instance = words.instance_of(words.scalars(read.resource.attributes, (words.INSTANCE, words.POD)), peer)
    for is_api in (False, True):
        own = [each for each in scopes if (each.scope.name == words.API_SCOPE) == is_api]
        if own:
            export = SlimExport()
            part = export.resource_spans.add()
            part.MergeFromString(common)
            part.scope_spans.extend(own)
            told = [
                span.span_id if is_api else span.parent_span_id
                for scope in own
                if scope.scope.name in (words.API_SCOPE, words.CORE_SCOPE)
                for span in scope.spans
            ]
            ids = frozenset(each for each in told if each)
            yield Part(is_api, instance, export.SerializeToString(), ids)
