"""A slim schema of an export, in which an event is bytes and what nobody asks for is left alone.

The field numbers are those of opentelemetry/proto/collector/trace/v1. What the schema does not name stays in the
message as unknown fields and goes out again when it is serialised: an export from which events were taken is still an
export, and the full schema decodes what is left of it. Parsing costs a tenth of a full parse.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELD = descriptor_pb2.FieldDescriptorProto


def _export_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="tracefit/slim.proto", package="tracefit.slim", syntax="proto3")
    export, resource, scope_spans, scope, span = (
        file.message_type.add(name=name) for name in ("Export", "ResourceSpans", "ScopeSpans", "Scope", "Span")
    )
    _add_field(export, "items", 1, _FIELD.TYPE_MESSAGE, repeated=True, of="ResourceSpans")
    _add_field(resource, "items", 2, _FIELD.TYPE_MESSAGE, repeated=True, of="ScopeSpans")
    _add_field(scope_spans, "scope", 1, _FIELD.TYPE_MESSAGE, of="Scope")
    _add_field(scope_spans, "items", 2, _FIELD.TYPE_MESSAGE, repeated=True, of="Span")
    _add_field(scope, "name", 1, _FIELD.TYPE_STRING)
    _add_field(span, "span_id", 2, _FIELD.TYPE_BYTES)
    _add_field(span, "parent_span_id", 4, _FIELD.TYPE_BYTES)
    _add_field(span, "end_unix_nano", 8, _FIELD.TYPE_FIXED64)
    _add_field(span, "events", 11, _FIELD.TYPE_BYTES, repeated=True)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tracefit.slim.Export"))


def _add_field(descriptor: Any, name: str, number: int, kind: Any, *, repeated: bool = False, of: str = "") -> None:
    label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
    field = descriptor.field.add(name=name, number=number, label=label, type=kind)
    if of:
        field.type_name = f".tracefit.slim.{of}"


SlimExport: Final = _export_class()
"""``items[].items[].items[]`` are the spans, with their ids, ``end_unix_nano`` and ``events``."""
