"""Spans of scopes that nobody here knows are taken in, left out by the worker, and counted to the last one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import CollectorRegistry

from collector.config import DedupeConfig
from collector.decode import vocabulary as words
from collector.receive.admission import AdmissionQueue
from collector.receive.intake import Intake
from collector.telemetry import Counts, table
from collector.telemetry.metrics import Metrics
from collector.telemetry.reasons import Skip, Transport
from collector.worker.correlator import TelemetryReader
from tests.support import otlp_bytes as otlp
from tests.support.clocks import FakeClock

SPAN = otlp.step_span([b"", b""])
NAMED = otlp.step_span([], tail=otlp.attribute("library", words.STEP_SCOPE, number=9))
LOST = otlp.step_span([b""], tail=b"\x60\x05")
STEPS = (words.STEP_SCOPE, [otlp.step_span([otlp.summary(1)])])
FOREIGN = ("fastapi", "telemetrygen", "", "vllm.other", "xvllm.scheduler.step")


def learned_from(payload):
    """What a sidecar reads of an export, and what it counts."""
    queue = AdmissionQueue(FakeClock(), capacity_bytes=1 << 30, wait_s=0, waiters_max=1)
    assert Intake(queue, Metrics(CollectorRegistry())).offer(payload, "peer", Transport.GRPC) is None
    batch = queue.take(1 << 30, 0)
    counts = Counts()
    reader = TelemetryReader(DedupeConfig())
    told = [telemetry for each in reader.read(batch.items if batch else (), counts) for _, telemetry in each]
    return told, counts, reader.foreign_scopes


def spans_of(payload):
    """Scope and span, as the official classes have them."""
    resources = ExportTraceServiceRequest.FromString(payload).resource_spans
    return [(scopes.scope.name, span) for each in resources for scopes in each.scope_spans for span in scopes.spans]


@pytest.mark.parametrize(
    ("payload", "steps"),
    [
        pytest.param(otlp.export(("fastapi", [SPAN, SPAN, b""])), 0, id="alone"),
        pytest.param(otlp.export(("fastapi", [SPAN])) + otlp.export(("flask", [SPAN] * 3)), 0, id="of two resources"),
        pytest.param(otlp.export(("fastapi", [NAMED])), 0, id="that name a known scope"),
        pytest.param(otlp.export(("fastapi", [SPAN, LOST])), 0, id="that lost events"),
        pytest.param(otlp.export(("fastapi", [SPAN]), STEPS), 1, id="before steps"),
        pytest.param(otlp.export(STEPS, ("fastapi", [SPAN] * 500)), 1, id="many behind steps"),
    ],
)
def test_foreign_spans_are_counted_and_left_out_and_steps_beside_them_are_read(payload, steps):
    told, counts, scopes = learned_from(payload)
    foreign = [span for scope, span in spans_of(payload) if scope not in words.KNOWN_SCOPES]
    assert sum(len(telemetry.steps) for telemetry in told) == steps
    assert counts[table.SKIPPED_SPANS, Skip.FOREIGN_SCOPE] == len(foreign)
    assert counts[table.SKIPPED_EVENTS, Skip.FOREIGN_SCOPE] == sum(len(span.events) for span in foreign)
    assert counts[table.SDK_DROPPED_EVENTS] == sum(span.dropped_events_count for span in foreign)
    assert "fastapi" in scopes


scopes = st.tuples(
    st.sampled_from([*FOREIGN, *sorted(words.KNOWN_SCOPES)]), st.lists(st.sampled_from([SPAN, NAMED, b""]), max_size=3)
)


@given(st.lists(st.lists(scopes, max_size=3), max_size=3))
def test_of_any_mixture_each_span_and_event_is_accepted_or_skipped_with_a_reason(exports):
    payload = b"".join(otlp.export(*each) for each in exports)
    _, counts, _ = learned_from(payload)
    spans = [span for _, span in spans_of(payload)]
    assert counts[table.DECODED_SPANS] == len(spans)
    assert counts[table.DECODED_SPANS_OK] + counts.total(table.SKIPPED_SPANS) == len(spans)
    events = sum(len(span.events) for span in spans)
    assert counts[table.DECODED_EVENTS_OK] + counts.total(table.SKIPPED_EVENTS) == events


def test_a_foreign_span_that_does_not_decode_makes_its_export_unreadable_and_each_span_is_counted():
    told, counts, _ = learned_from(otlp.export(("fastapi", [b"\x2a\x01\xff", SPAN]), STEPS))
    assert told == []
    assert (counts[table.DECODED_SPANS], counts[table.SKIPPED_SPANS, Skip.INCONSISTENT]) == (3, 3)
