"""An export cut by who emitted what, without decoding it: so that each engine's telemetry can be read by itself.

    export ─┬─ resource a ─┬─ steps, journeys, requests   ─►  OF_EMITTER   a   an export of its own
            │              └─ API spans                   ─►  OF_API       a   the same resource again
            └─ resource b ─── KV events alone             ─►  OF_KV        b   whose they are shows in the join

API spans are needed where the requests are whose parents they are: beside them stand the ids by which that shows.
Spans of scopes that nobody here knows are left out. A large export costs a look at each of its scopes, and at the first
fields of each request.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from functools import lru_cache
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from . import vocabulary as words
from . import wire
from .attributes import scalars

_RESOURCE_SPANS, _RESOURCE, _SCOPE_SPANS, _SCOPE, _NAME, _SPANS, _SPAN_ID, _PARENT_ID = 1, 1, 2, 1, 1, 2, 2, 4
_CACHED_BYTES_MAX: Final = 4096


class PartKind(IntEnum):
    """Who needs a part."""

    OF_EMITTER = 0
    OF_API = 1
    OF_KV = 2


class Part(NamedTuple):
    """What one resource of an export says to one kind of reader.

    ``ids``: of API spans their own, of journeys those of their parents, eight bytes each.
    """

    kind: PartKind
    instance: str
    payload: bytes
    ids: bytes = b""


def parts_by_emitter(payload: bytes, peer: str) -> list[Part]:
    """The parts of a serialised ExportTraceServiceRequest, in its order; ``peer`` names who has no name.

    Raises:
        ValueError: it does not decode.
    """
    try:
        bodies = [body for number, body in _messages(payload) if number == _RESOURCE_SPANS]
        parts = [part for body in bodies for part in _parts_of_resource(body, peer)]
    except (IndexError, DecodeError) as error:
        raise ValueError(f"no export: {error}") from None
    return parts


def _parts_of_resource(body: bytes, peer: str) -> Iterator[Part]:
    resource = b""
    common: list[bytes] = []
    scopes: dict[PartKind, list[bytes]] = {kind: [] for kind in PartKind}
    ids: dict[PartKind, list[bytes]] = {kind: [] for kind in PartKind}
    for number, inner in _messages(body):
        if number != _SCOPE_SPANS:
            resource += inner if number == _RESOURCE else b""
            common.append(_field(number, inner))
            continue
        scope = _scope_name(inner)
        if scope not in words.KNOWN_SCOPES:
            continue
        kind = _KIND_OF.get(scope, PartKind.OF_EMITTER)
        scopes[kind].append(_field(number, inner))
        if scope == words.CORE_SCOPE:
            ids[kind] += _ids(inner, _PARENT_ID)
        elif scope == words.API_SCOPE:
            ids[kind] += _ids(inner, _SPAN_ID)
    if scopes[PartKind.OF_EMITTER]:
        scopes[PartKind.OF_EMITTER] += scopes.pop(PartKind.OF_KV)
    instance = _instance_of(resource) or peer
    for kind, fields in scopes.items():
        if fields:
            yield Part(kind, instance, _field(_RESOURCE_SPANS, b"".join(common + fields)), b"".join(ids[kind]))


_KIND_OF: Final = {words.API_SCOPE: PartKind.OF_API, words.KV_SCOPE: PartKind.OF_KV}


def _instance_of(resource: bytes) -> str:
    return _read_instance_once(resource) if len(resource) <= _CACHED_BYTES_MAX else _read_instance(resource)


def _read_instance(resource: bytes) -> str:
    attributes = scalars(Resource.FromString(resource).attributes[: words.ATTRIBUTES_MAX])
    return str(attributes.get(words.INSTANCE) or "")


_read_instance_once = lru_cache(1024)(_read_instance)


def _scope_name(scope_spans: bytes) -> str:
    scope = b"".join(body for number, body in _messages(scope_spans) if number == _SCOPE)
    names = [body for number, body in _messages(scope) if number == _NAME]
    return names[-1].decode("utf-8", "replace") if names else ""


def _ids(scope_spans: bytes, wanted: int) -> Iterator[bytes]:
    """One id of each span: the first field of that number."""
    for number, span in _messages(scope_spans):
        if number == _SPANS:
            found = next((body for field, body in _messages(span) if field == wanted), b"")
            if len(found) == words.SPAN_ID_BYTES:
                yield found


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and body of the fields that have a length."""
    at, end = 0, len(data)
    while at < end:
        tag, body_at, at = wire.read_field(data, at)
        if at > end:
            raise ValueError("a field that leaves its message")
        if tag & 7 == wire.BYTES:
            yield tag >> 3, data[body_at:at]


def _field(number: int, body: bytes) -> bytes:
    return wire.varint(number << 3 | wire.BYTES) + wire.varint(len(body)) + body
