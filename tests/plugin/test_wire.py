"""The hand-written bytes are what opentelemetry-proto would have written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tracefit_vllm.encode import STEP_KEYS, Encoder
from tracefit_vllm.items import KvBatch, SnapshotRows, StepRow
from tracefit_vllm.wire import IntAttributes, attribute, event

from tests.plugin.receiver import attributes

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(values=st.lists(INT64, min_size=1, max_size=5), unix_ns=st.integers(0, 2**63))
def test_int_attributes_equal_those_of_opentelemetry_proto(values, unix_ns):
    keys = [f"a.key_{n}" * (n + 1) for n in range(len(values))]
    reference = Span(
        events=[
            Span.Event(
                time_unix_nano=unix_ns,
                name="an.EVENT",
                attributes=[KeyValue(key=k, value=AnyValue(int_value=v)) for k, v in zip(keys, values, strict=True)],
            )
        ]
    )
    encoded = event("an.EVENT", unix_ns, IntAttributes(keys).encode(values))
    assert Span.FromString(encoded) == reference


@given(
    value=st.one_of(INT64, st.booleans(), st.text(), st.binary(), st.floats(allow_nan=False)), key=st.text(max_size=200)
)
def test_any_attribute_is_read_back_with_its_type(value, key):
    span = Span.FromString(event("e", 1, attribute(key, value)))
    (pair,) = span.events[0].attributes
    read = getattr(pair.value, pair.value.WhichOneof("value"))
    assert (pair.key, read, type(read)) == (key, value, type(value))


def test_a_lone_surrogate_in_a_request_id_does_not_break_the_event():
    span = Span.FromString(event("e", 1, attribute("request.id", "a\ud800b")))
    assert span.events[0].attributes[0].value.string_value == "a?b"


def test_a_request_parses_as_otlp_with_its_scopes_and_resource():
    encoder = Encoder({"service.name": "vllm", "vllm.async_scheduling": True, "process.pid": 7}, 0.5)
    row = StepRow(5, 9, tuple(range(len(STEP_KEYS))))
    unanswered = StepRow(6, 0, tuple(range(len(STEP_KEYS))))
    snapshot = SnapshotRows(3, 5, [("id", "DECODE", 10, 11, 2, 0, 1)])
    kv = KvBatch(8, 3, 1, 6, [("BlockRemoved", {"block_count": 2, "medium": "GPU"})])
    request = ExportTraceServiceRequest.FromString(encoder.request([row, unanswered, snapshot, kv], {"queue_full": 4}))
    (resource_spans,) = request.resource_spans
    assert attributes(resource_spans.resource) == {
        "service.name": "vllm",
        "vllm.async_scheduling": True,
        "process.pid": 7,
    }
    steps, events = resource_spans.scope_spans
    assert (steps.scope.name, events.scope.name) == ("vllm.scheduler.step", "vllm.kv_events")
    (span,) = steps.spans
    assert span.dropped_events_count == 4
    assert attributes(span)["plugin.queue_full"] == 4
    assert attributes(span)["plugin.step_sample"] == 0.5
    first, second, third = span.events
    found = attributes(first)
    assert {key: found[key] for key in STEP_KEYS} == dict(zip(STEP_KEYS, range(len(STEP_KEYS)), strict=True))
    assert "step.ts_done_ns" not in attributes(second)
    assert attributes(third)["request.num_output_tokens"] == 2
    assert attributes(third)["request.scheduled_tokens_this_step"] == 1
    assert attributes(third)["step.id"] == 3
    (removed,) = events.spans[0].events
    assert attributes(removed) == {
        "step.id": 3,
        "data_parallel_rank": 1,
        "batch_seq": 6,
        "block_count": 2,
        "medium": "GPU",
    }


def test_losses_are_reported_once_as_a_difference_and_always_as_a_total():
    encoder = Encoder({}, 1.0)
    row = StepRow(5, 9, tuple(range(len(STEP_KEYS))))
    spans = [
        ExportTraceServiceRequest.FromString(encoder.request([row], drops)).resource_spans[0].scope_spans[0].spans[0]
        for drops in ({"queue_full": 3, "hook_error": 1}, {"queue_full": 3, "hook_error": 1}, {"queue_full": 5})
    ]
    assert [span.dropped_events_count for span in spans] == [3, 0, 2]
    assert attributes(spans[1])["plugin.queue_full"] == 3
    assert attributes(spans[1])["plugin.hook_error"] == 1
