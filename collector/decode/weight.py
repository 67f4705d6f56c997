"""How many messages would a full parse allocate: a look before the leap.

Two bytes on the wire are enough for an empty message, some seventy in memory: 32 MiB would become more than a gigabyte.
Real telemetry has 14 bytes a message. Only large inputs are counted, a third of a microsecond per field.
"""

from __future__ import annotations

from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from . import wire

SMALL_BYTES: Final = 1 << 20
"""Below, even the densest input costs less than 40 MB."""
BYTES_PER_MESSAGE: Final = 10
MESSAGES_MAX: Final = 1 << 21
"""A full batch of the SDK, 512 spans of 100 events of 16 attributes in 24 MB, has 1.7 million."""
BYTES_PER_FIELD: Final = 5
"""Telemetry has 7 bytes a field; this bounds the time spent here."""

_Table = dict[int, Any]
"""By tag: the table of the message in that field."""


def is_too_dense(data: bytes) -> bool:
    """Whether an export holds far more messages for its size than telemetry does; malformed bytes are the parser's."""
    if len(data) < SMALL_BYTES:
        return False
    try:
        return _exceeds(data, min(len(data) // BYTES_PER_MESSAGE, MESSAGES_MAX), len(data) // BYTES_PER_FIELD)
    except (IndexError, ValueError):
        return False


def _table(descriptor: Any, known: dict[str, _Table]) -> _Table:
    table = known.get(descriptor.full_name)
    if table is None:
        table = known[descriptor.full_name] = {}
        for field in descriptor.fields:
            if field.message_type is not None:
                table[field.number << 3 | wire.BYTES] = _table(field.message_type, known)
    return table


_EXPORT: Final = _table(ExportTraceServiceRequest.DESCRIPTOR, {})


def _exceeds(data: bytes, messages_left: int, fields_left: int) -> bool:
    """Whether the fields that the schema knows as messages, or all fields, are more than allowed."""
    todo = [(0, len(data), _EXPORT)]
    while todo:
        at, end, table = todo.pop()
        while at < end:
            fields_left -= 1
            tag, body_at, at = wire.read_field(data, at)
            if tag in table:
                messages_left -= 1
                if at > body_at:
                    todo.append((body_at, min(at, end), table[tag]))
            if messages_left < 0 or fields_left < 0:
                return True
    return False
