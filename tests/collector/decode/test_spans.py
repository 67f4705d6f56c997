"""Plain decoding: what the wire says reaches the right field; what it should not say is skipped and counted."""

import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from collector.decode import Export, decode_exports, spans
from collector.decode.records import STEP_DTYPE, Finish
from collector.decode.spans import read_columns
from collector.decode.vocabulary import KV_USAGE, MISSING, SUMMARY_FIELDS
from collector.decode.wire import ReadExport
from collector.join import SpanWindow
from collector.telemetry import Counts, table
from collector.telemetry.reasons import Skip
from tests.support import otlp_bytes as otlp
from tests.support.pipelines import assert_accounted, by_label
from tests.support.step_exports import attribute
from tests.support.toy_engine import UNIX_NS, Job, run_engine
from tests.support.toy_spans import (
    API_SCOPE,
    CORE_SCOPE,
    STEP_SCOPE,
    STOCK_SCOPE,
    Piece,
    api_span,
    core_span,
    decoded,
    put,
    step_span,
)


@pytest.fixture(scope="module")
def run():
    return run_engine([Job("a", 700, 5, 1), Job("b", 30, 9, 2), Job("c", 40, 50, 3, aborted_step=6)])


def test_every_attribute_of_a_summary_reaches_its_field(run):
    span = step_span(run, 1, len(run.summaries))
    optional = {name: index for index, (name, field) in enumerate(SUMMARY_FIELDS.items()) if field.least == MISSING}
    put(span.events[0], optional)
    steps = decoded(Piece("e", STEP_SCOPE, span)).steps
    for name, field in SUMMARY_FIELDS.items():
        absent = [optional.get(name), *[MISSING] * (len(steps) - 1)]
        assert steps[field.name].tolist() == (absent if name in optional else [s[name] for s in run.summaries])
    assert steps["kv_usage_ratio"].tolist() == [s[KV_USAGE] for s in run.summaries]
    assert steps["unix_ns"].tolist() == [run.unix(s["step.ts_end_ns"]) for s in run.summaries]


def test_snapshots_keep_tokens_and_never_the_request_id(run):
    snapshots = decoded(Piece("e", STEP_SCOPE, step_span(run, 1, 4, snapshots=True))).snapshots
    told = ("num_computed_tokens", "scheduled_tokens_this_step", "num_output_tokens")
    names = ("step.id", *(f"request.{name}" for name in told))
    assert snapshots.tolist() == [tuple(s[name] for name in names) for step in run.snapshots[:4] for s in step]


def test_many_events_become_columns_by_parts_and_a_journey_of_as_many_is_refused(run, monkeypatch):
    steps, journey = Piece("e", STEP_SCOPE, step_span(run, 1, 8)), Piece("e", CORE_SCOPE, core_span(run, run.jobs[0]))
    whole = decoded(steps).steps
    monkeypatch.setattr(spans, "_AT_ONCE", 3)
    assert decoded(steps).steps.tolist() == whole.tolist()
    assert not decoded(journey).core


def test_what_an_event_lacks_is_not_put_into_it():
    # a sender of empty events would have us hold 150 times what it sends
    event = ReadExport().resource_spans.add().scope_spans.add().spans.add().events.add()
    read_columns([event], SUMMARY_FIELDS, STEP_DTYPE)
    assert not event.attributes


def test_a_core_span_becomes_its_marks_in_order(run):
    job = run.jobs[0]
    (core,) = decoded(Piece("e", CORE_SCOPE, core_span(run, job))).core
    assert [(m.kind.name, m.step_id, m.ts_ns, m.output_tokens) for m in core.events] == job.marks
    assert core.prompt_tokens == 700
    assert core.finish is Finish.LENGTH
    assert core.unix_minus_mono_ns == run.offset_ns
    assert core.parent_span_id == api_span(run, job).span_id


def test_a_core_span_says_how_it_ended_an_error_if_nobody_knows_and_nothing_before_its_end(run):
    span = core_span(run, run.jobs[2])
    assert decoded(Piece("e", CORE_SCOPE, span)).core[0].finish is Finish.ABORTED
    span.events[-1].attributes[-1].value.string_value = "new in vLLM 2"
    assert decoded(Piece("e", CORE_SCOPE, span)).core[0].finish is Finish.ERROR
    del span.events[-1]
    assert decoded(Piece("e", CORE_SCOPE, span)).core[0].finish is None


def test_an_api_span_becomes_its_moments_and_tells_of_an_abort_and_of_what_was_not_sent(run):
    job = run.jobs[0]
    (api,) = decoded(Piece("a", API_SCOPE, api_span(run, job))).api
    finished = job.ns_of("FINISHED")
    assert api.departed_ns == pytest.approx(finished + 900_000, abs=300)
    assert api.arrived_ns == pytest.approx(job.marks[0][2] - 1_500_000, abs=300)
    assert (api.samples, api.model, api.aborted) == (1, "toy", False)
    (api,) = decoded(Piece("a", API_SCOPE, api_span(run, run.jobs[2]))).api
    assert (api.samples, api.departed_ns, api.aborted) == (1, MISSING, True)


@pytest.mark.parametrize(
    ("scope", "name"),
    [
        ("fastapi", "POST /v1/chat/completions"),
        (CORE_SCOPE, "scheduler_steps_1"),
        (API_SCOPE, "POST"),
        (STOCK_SCOPE, "llm_request"),
        (CORE_SCOPE, "llm_core"),
    ],
)
def test_foreign_spans_are_counted_with_their_events(scope, name):
    span = Span(name=name, span_id=b"12345678", start_time_unix_nano=UNIX_NS, end_time_unix_nano=UNIX_NS + 1)
    span.events.add(name="something")
    counts = Counts()
    decoded(Piece("e", scope, span), counts=counts)
    assert by_label(counts, table.DECODED_SPANS) == {Skip.UNKNOWN_SCOPE: 1}
    assert_accounted(counts, span)


def test_exports_are_read_side_by_side_and_one_that_is_damaged_is_counted_with_its_spans():
    good = [otlp.steps_export([otlp.summary(n) for n in range(70)], span_id=bytes([i] * 8)) for i in range(4)]
    broken_event = otlp.steps_export([otlp.summary(1), otlp.summary(2)[:-1]], span_id=b"brokenev")
    no_text = otlp.export(("fastapi", [b"\x2a\x01\xff"]))
    payloads = (good[0], good[1][:-3], b"", broken_event, no_text, good[1], good[1], good[2] + good[3])
    exports = [Export(payload, f"peer-{number}", 3) for number, payload in enumerate(payloads)]
    counts = Counts()
    told = decode_exports(exports, SpanWindow(64).accept, counts)
    assert [(one.peer, len(one.steps)) for one in told] == [
        ("peer-0", 70),
        ("peer-5", 70),
        ("peer-6", 0),
        ("peer-7", 140),
    ]
    assert by_label(counts, table.DECODED_SPANS) == {Skip.UNDECODABLE: 9, Skip.DUPLICATE: 1, table.ACCEPTED: 4}
    assert by_label(counts, table.DECODED_EVENTS) == {Skip.DUPLICATE: 70, table.ACCEPTED: 280}


def test_facts_are_the_knobs_of_the_resource_and_nothing_else_however_much_it_has(run):
    facts = (("vllm.max_num_seqs", "8"), ("hw.gpu.name", "H100"), ("host.name", "secret"), ("vllm.long", "x" * 999))
    foreign = ((f"a{n}", "x") for n in range(128))
    telemetry = decoded(Piece("e", STEP_SCOPE, step_span(run, 1, 3), (*foreign, *facts)))
    assert telemetry.facts == {"vllm.max_num_seqs": "8", "hw.gpu.name": "H100", "vllm.long": "x" * 256}


def test_foreign_events_and_attributes_beside_ours_change_nothing(run):
    spans = {
        STEP_SCOPE: step_span(run, 1, 5),
        CORE_SCOPE: core_span(run, run.jobs[0]),
        API_SCOPE: api_span(run, run.jobs[0]),
    }
    for scope, span in spans.items():
        plain = decoded(Piece("e", scope, span))
        strange = Span()
        strange.CopyFrom(span)
        strange.events.add(name="exception")
        strange.dropped_events_count = 778
        for event in strange.events:
            event.attributes.append(attribute("made.up", "x"))
            event.attributes.append(KeyValue(key="list", value=AnyValue(array_value=ArrayValue())))
            event.attributes.append(KeyValue(key="empty"))
        counts = Counts()
        odd = decoded(Piece("e", scope, strange), counts=counts)
        assert odd.steps.tolist() == plain.steps.tolist()
        assert (odd.core, odd.api) == (plain.core, plain.api)
        assert (counts[table.DECODED_EVENTS, Skip.UNKNOWN_SCOPE], counts[table.SDK_DROPPED_EVENTS,]) == (1, 778)
        assert_accounted(counts, strange)
