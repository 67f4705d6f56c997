"""A second, slim schema of an export, in which the events of a span are bytes and everything else is left alone.

The field numbers are those of opentelemetry/proto/collector/trace/v1. What the schema does not name stays in the
message as unknown fields and goes out again when it is serialised: an export from which events were taken is still an
export, and the full schema decodes what is left of it. Parsing costs a tenth of a full parse.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_CONTAINERS: Final = (("Export", 1), ("ResourceSpans", 2), ("ScopeSpans", 2), ("Span", 0))
"""Name, and the number of the repeated field that holds the next one: resource_spans, scope_spans, spans."""

_FIELD = descriptor_pb2.FieldDescriptorProto


def _classes() -> tuple[Any, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="tracefit/slim.proto", package="tracefit.slim", syntax="proto3")
    for depth, (name, number) in enumerate(_CONTAINERS):
        descriptor = file.message_type.add(name=name)
        if number:
            inner = f".tracefit.slim.{_CONTAINERS[depth + 1][0]}"
            _add_field(descriptor, "items", number, _FIELD.TYPE_MESSAGE, repeated=True, of=inner)
    scope_spans, span = file.message_type[-2:]
    _add_field(scope_spans, "scope", 1, _FIELD.TYPE_MESSAGE, of=".tracefit.slim.Scope")
    _add_field(span, "end_unix_nano", 8, _FIELD.TYPE_FIXED64)
    _add_field(span, "events", 11, _FIELD.TYPE_BYTES, repeated=True)
    _add_field(span, "dropped_events", 12, _FIELD.TYPE_UINT32)
    _add_field(file.message_type.add(name="Scope"), "name", 1, _FIELD.TYPE_STRING)
    _add_field(file.message_type.add(name="Merged"), "span", 2, _FIELD.TYPE_MESSAGE, of=".tracefit.slim.MergedSpan")
    merged = file.message_type.add(name="MergedSpan")
    _add_field(merged, "events", 11, _FIELD.TYPE_BYTES, repeated=True)
    _add_field(merged, "dropped_events", 12, _FIELD.TYPE_UINT32, repeated=True)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    export, merged_spans = (pool.FindMessageTypeByName(f"tracefit.slim.{name}") for name in ("Export", "Merged"))
    return message_factory.GetMessageClass(export), message_factory.GetMessageClass(merged_spans)


def _add_field(descriptor: Any, name: str, number: int, kind: Any, *, repeated: bool = False, of: str = "") -> None:
    label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
    field = descriptor.field.add(name=name, number=number, label=label, type=kind)
    if of:
        field.type_name = of


_CLASSES: Final = _classes()
SlimExport: Final = _CLASSES[0]
"""``Export.items[].items[].items[]`` are the spans, with ``end_unix_nano``, ``events``, ``dropped_events``."""
MergedSpans: Final = _CLASSES[1]
"""Reads a serialised ``ScopeSpans`` as if it had one span: protobuf merges what comes again, so that ``span`` has the
events of all spans in one list, without Python doing anything per span."""
