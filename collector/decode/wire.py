"""Exports as bytes: bounded before they are parsed, sliced by a slim schema, read from JSON, cut by who emitted what.

Who receives an export counts its spans before it answers: the accounting needs the number, and bytes that do not decode
are refused. A full parse costs 0.7 µs per step event, that with the slim schema a tenth. Its field numbers are those of
opentelemetry/proto/collector/trace/v1. What it does not name stays in the message as unknown fields and goes out again
when it is serialised.

Before a large input is parsed, the messages that a full parse would allocate are counted. Two bytes on the wire are
enough for an empty message, some seventy in memory: 32 MiB would become more than a gigabyte. Real telemetry has 14
bytes a message. Only large inputs are counted, a third of a microsecond per field.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans

from collector.telemetry import Outcome

from . import vocabulary as words

SPANS_MAX: Final = 65_536
"""Spans, scopes and resources that one export may hold; an SDK batch is 512 spans."""
SMALL_BYTES: Final = 2 * SPANS_MAX
"""Two bytes are the smallest message: up to here there cannot be too many, and a batch of an SDK is rarely larger."""
LARGE_BYTES: Final = 1 << 20
"""From here on messages and fields are counted; below, even the densest input costs less than 40 MB."""
_BYTES_PER_MESSAGE: Final = 10
_MESSAGES_MAX: Final = 1 << 21
"""A full batch of the SDK, 512 spans of 100 events of 16 attributes in 24 MB, has 1.7 million."""
_BYTES_PER_FIELD: Final = 5
"""Telemetry has 7 bytes a field; this bounds the time spent here."""


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


def read_span_ends(payload: bytes) -> list[int] | Outcome:
    """When each span of a serialised ExportTraceServiceRequest ended, in unix ns, or why it is none."""
    try:
        if len(payload) > SMALL_BYTES and _is_more(payload, _SPANS, SPANS_MAX, len(payload)):
            return Outcome.TOO_LARGE
        if len(payload) >= LARGE_BYTES and is_too_dense(payload):
            return Outcome.TOO_LARGE
        resources = SlimExport.FromString(payload).items
    except (IndexError, ValueError, DecodeError):
        return Outcome.UNDECODABLE
    return [span.end_unix_nano for resource in resources for scope in resource.items for span in scope.items]


# --- how dense an export is -------------------------------------------------------------------------------------------

VARINT, I64, BYTES, I32 = 0, 1, 2, 5
_FIXED_BYTES: Final = {I64: 8, I32: 4}
_LAST: Final = 0x80
"""Bytes below it end a varint."""
_SHIFT_MAX: Final = 63
"""A varint has at most ten bytes."""

Table = dict[int, Any]
"""By tag: the table of the message in that field."""

_SPAN: Final[Table] = {}
_SPANS: Final[Table] = {1 << 3 | BYTES: {2 << 3 | BYTES: {2 << 3 | BYTES: _SPAN}}}
"""From resources over scopes to spans, which are not looked into."""


def is_too_dense(data: bytes) -> bool:
    """Whether an export holds far more messages or fields for its size than telemetry does.

    Raises:
        IndexError, ValueError: it is no message, or has a group: deprecated since 2008, and in no schema read here.
    """
    return _is_more(data, _EXPORT, min(len(data) // _BYTES_PER_MESSAGE, _MESSAGES_MAX), len(data) // _BYTES_PER_FIELD)


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
                messages -= 1
                if at > body_at and inner is not _SPAN:
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


def _table(descriptor: Any, known: dict[str, Table]) -> Table:
    table = known.get(descriptor.full_name)
    if table is None:
        table = known[descriptor.full_name] = {}
        for field in descriptor.fields:
            if field.message_type is not None:
                table[field.number << 3 | BYTES] = _table(field.message_type, known)
    return table


_EXPORT: Final = _table(ExportTraceServiceRequest.DESCRIPTOR, {})

# --- the slim schema --------------------------------------------------------------------------------------------------

_FIELD = descriptor_pb2.FieldDescriptorProto
_SLIM: Final[dict[str, tuple[tuple[str, int, Any], ...]]] = {
    "Export": (("items", 1, "ResourceSpans"),),
    "ResourceSpans": (("items", 2, "ScopeSpans"),),
    "ScopeSpans": (("scope", 1, "Scope"), ("items", 2, "Span")),
    "Scope": (("name", 1, _FIELD.TYPE_STRING),),
    "Span": (
        ("span_id", 2, _FIELD.TYPE_BYTES),
        ("parent_span_id", 4, _FIELD.TYPE_BYTES),
        ("end_unix_nano", 8, _FIELD.TYPE_FIXED64),
    ),
}
"""Messages and their fields: name, number, and which type or message; plurals are repeated."""


def _export_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="tracefit/slim.proto", package="tracefit.slim", syntax="proto3")
    for message, fields in _SLIM.items():
        descriptor = file.message_type.add(name=message)
        for name, number, kind in fields:
            label = _FIELD.LABEL_REPEATED if name.endswith("s") else _FIELD.LABEL_OPTIONAL
            if isinstance(kind, str):
                of = {"type": _FIELD.TYPE_MESSAGE, "type_name": f".tracefit.slim.{kind}"}
            else:
                of = {"type": kind}
            descriptor.field.add(name=name, number=number, label=label, **of)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tracefit.slim.Export"))


SlimExport: Final = _export_class()
"""``items[].items[].items[]`` are the spans, with their ids and ``end_unix_nano``."""

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
    """What one resource of an export says to one kind of reader.

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
        return [part for resource in SlimExport.FromString(payload).items for part in _parts_of(resource, peer)]
    except DecodeError as error:
        raise ValueError(f"no export: {error}") from None


def _parts_of(resource: Any, peer: str) -> Iterator[Part]:
    scopes = [*resource.items]
    resource.ClearField("items")
    common = resource.SerializeToString()
    attributes = words.scalars(ResourceSpans.FromString(common).resource.attributes)
    instance = words.instance_of(attributes, peer)
    for is_api in (False, True):
        own = [each for each in scopes if (each.scope.name == words.API_SCOPE) == is_api]
        if own:
            export = SlimExport()
            part = export.items.add()
            part.MergeFromString(common)
            part.items.extend(own)
            told = [
                span.span_id if is_api else span.parent_span_id
                for scope in own
                if scope.scope.name in (words.API_SCOPE, words.CORE_SCOPE)
                for span in scope.items
            ]
            ids = frozenset(each for each in told if each)
            yield Part(is_api, instance, export.SerializeToString(), ids)
