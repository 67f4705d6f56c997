"""Attributes of spans and events as numbers within their bounds; what is out of them is rejected with its reason."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from collector.telemetry import Skip

from . import vocabulary as words

Value = bool | int | float | str


class Rejected(Exception):
    """One span or event cannot be used; never leaves the decoder."""

    def __init__(self, reason: Skip) -> None:
        super().__init__(reason)
        self.reason = reason


def read_fields(event: Span.Event, table: Mapping[str, words.Field]) -> dict[str, float]:
    """Fields of one event by its table; raises Rejected on a wrong type, a bad value or a missing attribute."""
    attributes = event.attributes
    if len(attributes) > words.ATTRIBUTES_MAX:
        raise Rejected(Skip.TOO_MANY_ATTRIBUTES)
    out: dict[str, float] = {}
    for attribute in attributes:
        field = table.get(attribute.key)
        if field is None:
            continue
        name, limit, _, double = field
        value = attribute.value
        number = value.double_value if double else value.int_value
        # it reads 0 where the value is of another kind; to ask which costs as much as all else here
        if not number and value.WhichOneof("value") != ("double_value" if double else "int_value"):
            raise Rejected(Skip.WRONG_TYPE)
        if not 0 <= number <= limit:
            raise Rejected(Skip.OUT_OF_RANGE if math.isfinite(number) else Skip.NOT_FINITE)
        out[name] = number
    if len(out) < len(table) and any(field.required and field.name not in out for field in table.values()):
        raise Rejected(Skip.MISSING_ATTRIBUTE)
    return out


def scalars(attributes: Iterable[KeyValue], keys: Container[str] | None = None) -> dict[str, Value]:
    """Scalar attributes by key, of the keys given or all.

    Arrays, maps, bytes and empty values are left out (OTLP allows them since 1.9).
    """
    out: dict[str, Value] = {}
    for attribute in attributes:
        key = attribute.key
        if keys is None or key in keys:
            value = _scalar(attribute.value)
            if value is not None:
                out[key] = value
    return out


def scalar(attributes: Sequence[KeyValue], key: str) -> Value | None:
    """One of the scalar attributes that are read, the last of that key; None where there is none."""
    for place in range(min(len(attributes), words.ATTRIBUTES_MAX) - 1, -1, -1):  # each look at one makes an object
        attribute = attributes[place]
        if attribute.key == key:
            value = _scalar(attribute.value)
            if value is not None:
                return value
    return None


def _scalar(value: AnyValue) -> Value | None:
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind in _SCALARS else None


_SCALARS: Final = frozenset({"string_value", "int_value", "double_value", "bool_value"})


def event_scalars(event: Span.Event) -> dict[str, Value]:
    """Scalar attributes of an event, as many of them as are read."""
    return scalars(event.attributes[: words.ATTRIBUTES_MAX])


def read_count(attributes: Mapping[str, Value], key: str, default: int | None = None) -> int:
    """A count of requests or tokens; ``default`` where it was not sent, Rejected where there is none."""
    value = attributes.get(key)
    if value is None:
        if default is None:
            raise Rejected(Skip.MISSING_ATTRIBUTE)
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise Rejected(Skip.WRONG_TYPE)
    if not 0 <= value <= words.COUNT_MAX:
        raise Rejected(Skip.OUT_OF_RANGE)
    return value


def read_seconds(value: Value | None) -> float:
    """A latency in seconds; NaN when it was not sent."""
    if value is None:
        return math.nan
    if isinstance(value, bool | str):
        raise Rejected(Skip.WRONG_TYPE)
    if not math.isfinite(value):
        raise Rejected(Skip.NOT_FINITE)
    if not 0 <= value < words.TIME_MAX / 1e9:
        raise Rejected(Skip.OUT_OF_RANGE)
    return float(value)


def nanoseconds(seconds: Value) -> int:
    """A moment that was sent in seconds."""
    return round(read_seconds(seconds) * 1e9)
