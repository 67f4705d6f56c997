"""Pieces of an export hold what the export holds, whatever it looks like, and stay small where they can."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.decode.pieces import pieces
from tests.support import otlp_bytes as otlp

contents = st.binary(max_size=40)
unknown = st.sampled_from([b"", b"\xa8\x06\x01", otlp.field(100, b"what is this"), b"\xa1\x06" + bytes(8)])
scopes = st.tuples(st.text(max_size=3), st.lists(contents, max_size=6), unknown)
resources = st.tuples(contents, st.lists(scopes, max_size=4), unknown)


def build(parts, tail):
    """Unknown fields stand behind what they belong to."""
    out = b""
    for resource, inner, resource_tail in parts:
        body = b""
        for name, spans, scope_tail in inner:
            scope = otlp.field(1, otlp.field(1, name.encode()))
            body += otlp.field(2, scope + b"".join(otlp.field(2, otlp.field(5, span)) for span in spans) + scope_tail)
        out += otlp.field(1, otlp.field(1, otlp.field(1, otlp.field(1, resource))) + body + resource_tail)
    return out + tail


def flat(payloads):
    """Every span with all that is said about it, in order."""
    found = []
    for payload in payloads:
        for resource in ExportTraceServiceRequest.FromString(payload).resource_spans:
            for scope in resource.scope_spans:
                around = type(resource)(), type(scope)()
                around[0].CopyFrom(resource)
                around[0].ClearField("scope_spans")
                around[1].CopyFrom(scope)
                around[1].ClearField("spans")
                said = [message.SerializeToString() for message in around]
                found += [(*said, span.SerializeToString()) for span in scope.spans]
    return found


@given(st.lists(resources, max_size=4), unknown, st.integers(1, 400))
def test_every_span_is_in_one_piece_with_all_that_is_said_about_it(parts, tail, piece_bytes):
    readable = [(resource.hex().encode(), inner, more) for resource, inner, more in parts]
    payload = build(
        [(r, [(n, [s.hex().encode() for s in spans], t) for n, spans, t in i], m) for r, i, m in readable], tail
    )
    cut = list(pieces(payload, piece_bytes))
    assert flat(cut) == flat([payload])
    if len(payload) <= piece_bytes:
        assert cut == [payload]
