"""An export cut by who emitted what, without decoding it: so that each engine's telemetry can be read by itself.

    export ─┬─ resource a ─┬─ steps, journeys, requests   ─►  OF_EMITTER   a   an export of its own
            │              └─ API spans                   ─►  OF_API       a   the same resource again
            └─ resource b ─── KV events alone             ─►  OF_KV        b   whose they are shows in the join

API spans are needed where the requests are whose parents they are: beside them stand the ids by which that shows.
Spans of scopes that nobody here knows are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans

from . import vocabulary as words
from .attributes import scalar
from .wire import SlimExport


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
        return [part for resource in SlimExport.FromString(payload).items for part in _parts_of(resource, peer)]
    except DecodeError as error:
        raise ValueError(f"no export: {error}") from None


def _parts_of(resource: Any, peer: str) -> Iterator[Part]:
    scopes: dict[PartKind, list[bytes]] = {kind: [] for kind in PartKind}
    ids: dict[PartKind, list[bytes]] = {kind: [] for kind in PartKind}
    for scope_spans in resource.items:
        name = scope_spans.scope.name
        if name in words.KNOWN_SCOPES:
            kind = _KIND_OF.get(name, PartKind.OF_EMITTER)
            scopes[kind].append(scope_spans.SerializeToString())
            if name == words.CORE_SCOPE:
                ids[kind] += [span.parent_span_id for span in scope_spans.items]
            elif name == words.API_SCOPE:
                ids[kind] += [span.span_id for span in scope_spans.items]
    if scopes[PartKind.OF_EMITTER]:
        scopes[PartKind.OF_EMITTER] += scopes.pop(PartKind.OF_KV)
    resource.ClearField("items")
    common = resource.SerializeToString()
    instance = scalar(ResourceSpans.FromString(common).resource.attributes, words.INSTANCE)
    for kind, bodies in scopes.items():
        if bodies:
            export = SlimExport()
            part = export.items.add()
            part.MergeFromString(common)
            for body in bodies:
                part.items.add().MergeFromString(body)
            own_ids = b"".join([each for each in ids[kind] if len(each) == words.SPAN_ID_BYTES])
            yield Part(kind, str(instance or peer), export.SerializeToString(), own_ids)


_KIND_OF: Final = {words.API_SCOPE: PartKind.OF_API, words.KV_SCOPE: PartKind.OF_KV}
