"""Slim schemas of an export, in which what nobody asks for is bytes or left alone.

The field numbers are those of opentelemetry/proto/collector/trace/v1. What a schema does not name stays in the message
as unknown fields and goes out again when it is serialised: an export from which events were taken is still an export,
and the full schema decodes what is left of it. Parsing costs a tenth of a full parse.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELD = descriptor_pb2.FieldDescriptorProto


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="tracefit/slim.proto", package="tracefit.slim", syntax="proto3")
    _add_field(file.message_type.add(name="Scope"), "name", 1, _FIELD.TYPE_STRING)
    slim, outline = (_add_containers(file, schema) for schema in ("Slim", "Outline"))
    merged = _add_containers(file, "Merged", repeated=False)
    _add_field(slim, "items", 2, _FIELD.TYPE_MESSAGE, repeated=True, of="SlimSpan")
    span = file.message_type.add(name="SlimSpan")
    _add_field(span, "end_unix_nano", 8, _FIELD.TYPE_FIXED64)
    _add_field(span, "events", 11, _FIELD.TYPE_BYTES, repeated=True)
    _add_field(span, "dropped_events", 12, _FIELD.TYPE_UINT32)
    _add_field(outline, "items", 2, _FIELD.TYPE_BYTES, repeated=True)
    _add_field(merged, "span", 2, _FIELD.TYPE_MESSAGE, of="MergedSpan")
    span = file.message_type.add(name="MergedSpan")
    _add_field(span, "events", 11, _FIELD.TYPE_BYTES, repeated=True)
    _add_field(span, "dropped_events", 12, _FIELD.TYPE_UINT32, repeated=True)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    messages = (pool.FindMessageTypeByName(f"tracefit.slim.{message.name}") for message in file.message_type)
    return {message.name: message_factory.GetMessageClass(message) for message in messages}


def _add_containers(file: Any, schema: str, *, repeated: bool = True) -> Any:
    """An export of resources of scopes; the message of a scope, which has no spans yet."""
    export, resource, scope_spans = (
        file.message_type.add(name=f"{schema}{name}") for name in ("Export", "ResourceSpans", "ScopeSpans")
    )
    for container, number, inner in ((export, 1, resource), (resource, 2, scope_spans)):
        _add_field(container, "items", number, _FIELD.TYPE_MESSAGE, repeated=repeated, of=inner.name)
    _add_field(scope_spans, "scope", 1, _FIELD.TYPE_MESSAGE, of="Scope")
    return scope_spans


def _add_field(descriptor: Any, name: str, number: int, kind: Any, *, repeated: bool = False, of: str = "") -> None:
    label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
    field = descriptor.field.add(name=name, number=number, label=label, type=kind)
    if of:
        field.type_name = f".tracefit.slim.{of}"


_CLASSES: Final = _classes()
SlimExport: Final = _CLASSES["SlimExport"]
"""``items[].items[].items[]`` are the spans, with ``end_unix_nano``, ``events``, ``dropped_events``."""
OutlineExport: Final = _CLASSES["OutlineExport"]
"""``items[].items[].items[]`` are the spans as bytes, whatever they hold."""
MergedExport: Final = _CLASSES["MergedExport"]
"""``items.items.span`` is all spans in one: protobuf merges what comes again, so that it has their events in one list,
without Python doing anything per span."""
MergedSpans: Final = _CLASSES["MergedScopeSpans"]
"""The same of one serialised ``ScopeSpans``."""
