"""Exports as bytes: bounded before they are parsed, sliced by a slim schema, read from JSON, cut by who emitted what.

Before a large input is parsed, the messages that a full parse would allocate are counted. Two bytes on the wire are
enough for an empty message, some seventy in memory: 32 MiB would become more than a gigabyte. Real telemetry has 14
bytes a message. Only large inputs are counted, a third of a microsecond per field.

The field numbers of the slim schema are those of opentelemetry/proto/collector/trace/v1. What it does not name stays in
the message as unknown fields and goes out again when it is serialised. Parsing costs a tenth of a full parse.
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

from . import vocabulary as words

VARINT, I64, BYTES, I32 = 0, 1, 2, 5
GROUP: Final = frozenset({3, 4})
"""Where a group begins and ends: deprecated since 2008, in no schema that is read here."""
_FIXED_BYTES: Final = {I64: 8, I32: 4} | dict.fromkeys(GROUP, 0)

_LAST: Final = 0x80
"""Bytes below it end a varint."""
_SHIFT_MAX: Final = 63
"""A varint has at most ten bytes."""


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Value, and where the next field begins.

    Raises:
        IndexError: the data end before it does.
        ValueError: it has more than ten bytes.
    """
    byte = data[at]
    if byte < _LAST:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < _LAST:
            return value, at + 1
        shift += 7
        if shift > _SHIFT_MAX:
            raise ValueError("a varint without an end")


def read_field(data: bytes | memoryview, at: int) -> tuple[int, int, int]:
    """Tag of a field, where its body begins, where the next field begins; each end of a group is a field of its own.

    Raises:
        IndexError: the data end before the body begins.
        ValueError: a number has no end, or the wire type does not exist.
    """
    tag, at = data[at], at + 1
    if tag >= _LAST:
        tag, at = read_varint(data, at - 1)
    kind = tag & 7
    if kind == BYTES:
        length, at = data[at], at + 1
        if length >= _LAST:
            length, at = read_varint(data, at - 1)
        return tag, at, at + length
    if kind == VARINT:
        return tag, at, read_varint(data, at)[1]
    if kind not in _FIXED_BYTES:
        raise ValueError("an unknown wire type")
    return tag, at, at + _FIXED_BYTES[kind]


SMALL_BYTES: Final = 1 << 20
"""Below, even the densest input costs less than 40 MB."""
BYTES_PER_MESSAGE: Final = 10
MESSAGES_MAX: Final = 1 << 21
"""A full batch of the SDK, 512 spans of 100 events of 16 attributes in 24 MB, has 1.7 million."""
BYTES_PER_FIELD: Final = 5
"""Telemetry has 7 bytes a field; this bounds the time spent here."""

Table = dict[int, Any]
"""By tag: the table of the message in that field."""


def is_too_dense(data: bytes) -> bool:
    """Whether an export holds far more messages for its size than telemetry does, or cannot be walked to its end.

    What the walk does not understand would hide the rest from it, and not from a parser, which skips groups.
    """
    if len(data) < SMALL_BYTES:
        return False
    try:
        walk(data, _EXPORT, min(len(data) // BYTES_PER_MESSAGE, MESSAGES_MAX), len(data) // BYTES_PER_FIELD)
    except (TooMany, IndexError, ValueError):
        return True
    return False


def _table(descriptor: Any, known: dict[str, Table]) -> Table:
    table = known.get(descriptor.full_name)
    if table is None:
        table = known[descriptor.full_name] = {}
        for field in descriptor.fields:
            if field.message_type is not None:
                table[field.number << 3 | BYTES] = _table(field.message_type, known)
    return table


_EXPORT: Final = _table(ExportTraceServiceRequest.DESCRIPTOR, {})


class TooMany(Exception):
    """An export holds more messages or fields than are looked at."""


def walk(data: bytes, table: Table, messages_max: int, fields_max: int, *, into_innermost: bool = True) -> None:
    """Count the fields of a message, and those that a table knows as messages, without decoding it.

    Args:
        data: the message.
        table: what is looked into.
        messages_max: most messages in it.
        fields_max: most fields in it, and in these.
        into_innermost: also count the fields of messages in which the table knows no other.

    Raises:
        TooMany: there are more.
        IndexError, ValueError: it is no message, or has a group.
    """
    todo, messages, fields = [(0, len(data), table)], messages_max, fields_max
    while todo:
        at, end, known = todo.pop()
        while at < end:
            tag, body_at, at = read_field(data, at)
            if at > end or tag & 7 in GROUP:
                raise ValueError("a group, or a field that leaves its message")
            fields -= 1
            inner = known.get(tag)
            if inner is not None:
                messages -= 1
                if at > body_at and (inner or into_innermost):
                    todo.append((body_at, at, inner))
            if messages < 0 or fields < 0:
                raise TooMany


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


def count_json_values(text: bytes) -> int:
    """Braces, brackets and commas of a JSON text: it has at most twice as many values. Marks within strings count."""
    return text.count(b"{") + text.count(b"[") + text.count(b",")


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

    API spans are needed where the requests are whose parents they are, which ``ids`` tell, eight bytes each: of API
    spans their own, of journeys those of their parents.
    """

    is_api: bool
    instance: str
    payload: bytes
    newest_end_unix_nano: int
    ids: bytes


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
            ids = b"".join([each for each in told if len(each) == words.SPAN_ID_BYTES])
            newest = max((span.end_unix_nano for scope in own for span in scope.items), default=0)
            yield Part(is_api, instance, export.SerializeToString(), newest, ids)
