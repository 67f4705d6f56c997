"""Whatever comes in is counted with a reason and teaches nothing; what is sound goes on being learned."""

from __future__ import annotations

import math
import tracemalloc

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from collector.config.schema import Config
from collector.decode import Export
from collector.decode.records import CoreSpan, Finish, SpanEvent, SpanEventKind, Telemetry
from collector.join import Joiner, Rows
from collector.telemetry import table
from collector.telemetry.reasons import JoinEvent, RowDrop, Skip
from tests.support.pipelines import assert_accounted, by_label, new_pipeline, replayed, step_coefficients
from tests.support.step_exports import attribute
from tests.support.toy_engine import MONO_NS, UNIX_NS, many_jobs, run_engine
from tests.support.toy_spans import (
    API_SCOPE,
    CORE_SCOPE,
    STEP_SCOPE,
    STOCK_SCOPE,
    Piece,
    api_span,
    core_span,
    export_of,
    exports_of,
    pieces,
    put,
    span_id,
    step_span,
    stock_span,
)

HUGE = 2**63 - 1


@pytest.fixture(scope="module")
def sound():
    """A run of a healthy engine, some 40 s long."""
    return run_engine(many_jobs(60))


def export(*group: Piece) -> Export:
    return Export(export_of(group).SerializeToString(), "peer", len(group))


def changed(span: Span, key: str, value: object, *, event: int | None = None) -> Span:
    """A copy of a span with one attribute of its events, or of one of them, replaced (None: removed)."""
    out = Span()
    out.CopyFrom(span)
    for holder in out.events if event is None else [out.events[event]]:
        kept = [each for each in holder.attributes if each.key != key]
        del holder.attributes[:]
        holder.attributes.extend(kept if value is None else [*kept, attribute(key, value)])
    return out


def left_out(scope: str, span: Span):
    """Counts after this span."""
    pipeline = new_pipeline()
    pipeline.process([export(Piece("bad", scope, span))])
    pipeline.flush()
    counts = pipeline.take_counts()
    assert_accounted(counts, span)
    return counts


NO_COUNT = {
    **dict.fromkeys((None, "12", 12.5, True, b"12"), Skip.MISSING_ATTRIBUTE),
    -5: Skip.OUT_OF_RANGE,
    HUGE: Skip.OUT_OF_RANGE,
    -(2**63): Skip.OUT_OF_RANGE,
}


@pytest.mark.parametrize("value", NO_COUNT)
def test_what_is_no_count_costs_a_step_its_event_and_a_journey_its_span(sound, value):
    reason, journey_of = NO_COUNT[value], core_span(sound, sound.jobs[3])
    for key in ("step.id", "step.ts_start_ns", "batch.num_decode_reqs", "batch.prefill_tokens", "kv.blocks_free_gpu"):
        counts = left_out(STEP_SCOPE, changed(step_span(sound, 1, 20), key, value))
        assert (counts[table.DECODED_EVENTS, reason], counts[table.DECODED_SPANS, table.ACCEPTED]) == (20, 1)
    for key in ("ts.monotonic_ns", "scheduler.step", "decode.done_tokens", "prefill.total_tokens"):
        counts = left_out(CORE_SCOPE, changed(journey_of, key, value, event=1))
        assert by_label(counts, table.DECODED_SPANS) == {reason: 1}


@pytest.mark.parametrize(
    ("value", "reason"),
    [(None, Skip.INVALID), ("1", Skip.INVALID), (math.nan, Skip.INVALID), (-1.0, Skip.OUT_OF_RANGE)],
)
def test_what_is_no_time_costs_a_request_of_the_api_server_its_span(sound, value, reason):
    span = changed(api_span(sound, sound.jobs[3]), "event.ts.monotonic", value, event=1)
    assert by_label(left_out(API_SCOPE, span), table.DECODED_SPANS) == {reason: 1}


@pytest.mark.parametrize("unix", [0, 1, 42 * 10**17, 2**64 - 1, 2**63])
def test_an_event_without_a_credible_wall_clock_is_out_of_range(sound, unix):
    for scope, span in ((STEP_SCOPE, step_span(sound, 1, 5)), (CORE_SCOPE, core_span(sound, sound.jobs[0]))):
        for event in span.events:
            event.time_unix_nano = unix
        assert left_out(scope, span)[table.DECODED_EVENTS, Skip.OUT_OF_RANGE] == len(span.events)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"start_time_unix_nano": 0, "end_time_unix_nano": 0}, Skip.OUT_OF_RANGE),
        ({"start_time_unix_nano": 1, "end_time_unix_nano": 2**64 - 1}, Skip.OUT_OF_RANGE),
        ({"start_time_unix_nano": UNIX_NS + 1, "end_time_unix_nano": UNIX_NS}, Skip.INVALID),
        # ids are remembered for ten minutes: their length bounds the memory that takes
        *(({"span_id": b"x" * length}, Skip.OUT_OF_RANGE) for length in (0, 7, 9, 4096)),
        ({"trace_id": b"x" * 4096}, Skip.OUT_OF_RANGE),
    ],
)
def test_a_span_with_impossible_times_or_ids_is_refused(sound, change, reason):
    span = step_span(sound, 1, 5)
    for name in change:
        setattr(span, name, change[name])
    assert by_label(left_out(STEP_SCOPE, span), table.DECODED_SPANS) == {reason: 1}


@pytest.mark.parametrize(("length", "held"), [(256, 1), (257, 0)])
def test_an_emitter_is_held_by_a_name_of_bounded_length_alone(sound, length, held):
    pipeline = new_pipeline()
    pipeline.process([export(Piece("n" * length, STEP_SCOPE, step_span(sound, 1, 5)))])
    assert pipeline.take_counts()[table.DECODED_SPANS, Skip.OUT_OF_RANGE] == 1 - held
    assert len(pipeline.joiner.emitters) == held


def test_attributes_that_nobody_reads_cost_nothing(sound):
    flood, span = [attribute(f"vllm.{n}", n) for n in range(10_000)], step_span(sound, 7, 9)
    span.events[0].attributes.extend(flood)
    request = export_of([Piece("many", STEP_SCOPE, span)])
    request.resource_spans[0].resource.attributes.extend(flood)
    pipeline = new_pipeline()
    pipeline.process([Export(request.SerializeToString(), "peer", 1)])
    assert pipeline.take_counts()[table.DECODED_EVENTS, table.ACCEPTED] == 3
    assert len(pipeline.joiner.emitters[0].facts.as_dict()) < 200


def test_a_request_of_a_billion_tokens_takes_no_memory():
    pipeline, span = new_pipeline(), stock_span("a", 0.0, prompt=5, outputs=2**30 - 1, ttft_s=1.0, decode_s=9.0)
    pipeline.process([export(Piece("bad", STOCK_SCOPE, span))])
    tracemalloc.start()
    pipeline.flush()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 64 << 20
    assert pipeline.take_counts()[table.DROPPED_ROWS, RowDrop.TOO_LONG] == 1


# --- journeys that cannot have happened ---------------------------------------------------------------------------


def journey(*marks: tuple[str, int, float, int], name: str = "j") -> Span:
    """(kind, step, seconds, output tokens) ..."""
    span = Span(name="llm_core", span_id=span_id(name), trace_id=b"t" * 16, start_time_unix_nano=UNIX_NS)
    for kind, step, at_s, done in marks:
        ns = int(at_s * 1e9)
        event = span.events.add(name=f"journey.{kind}", time_unix_nano=UNIX_NS + ns)
        put(event, {"ts.monotonic_ns": MONO_NS + ns, "scheduler.step": step, "decode.done_tokens": done})
        put(event, {"prefill.total_tokens": 100})
    span.end_time_unix_nano = max(event.time_unix_nano for event in span.events)
    return span


@pytest.mark.parametrize(
    ("marks", "reason"),
    [
        ([("QUEUED", 1, 1.0, 0), ("SCHEDULED", 2, 0.5, 0)], Skip.INVALID),
        ([("FINISHED", 5, 1.0, 3), ("FIRST_TOKEN", 5, 2.0, 3)], Skip.INVALID),
        ([("SCHEDULED", 2, 1.0, 0), ("QUEUED", 2, 2.0, 0)], Skip.INVALID),
        ([("SCHEDULED", 9, 1.0, 0), ("FIRST_TOKEN", 3, 2.0, 1)], Skip.INVALID),
        ([("SCHEDULED", 2, 1.0, 7), ("FINISHED", 9, 2.0, 3)], Skip.INVALID),
        ([("SCHEDULED", 2, 1.0, 0), ("SCHEDULED", 3, 2.0, 0)], Skip.INVALID),
        ([("unknown", 2, 1.0, 0)], Skip.UNKNOWN_SCOPE),
    ],
)
def test_a_journey_in_impossible_order_is_refused(marks, reason):
    assert by_label(left_out(CORE_SCOPE, journey(*marks)), table.DECODED_SPANS) == {reason: 1}


ODD = [
    [("SCHEDULED", 5, 1.0, 0), ("PREEMPTED", 6, 2.0, 0), ("SCHEDULED", 10**12, 3.0, 0)],
    [("SCHEDULED", 5, 1.0, 0), ("PREEMPTED", 5, 2.0, 0), ("SCHEDULED", 900, 3.0, 0), ("FINISHED", 901, 4.0, 0)],
    [("SCHEDULED", 5, 1.0, 0), ("PREEMPTED", 6, 2.0, 0), ("FINISHED", 10**9, 3.0, 0)],
    [("QUEUED", 0, 0.5, 0), ("FIRST_TOKEN", 10**9, 1.0, 1), ("FINISHED", 10**9 + 5, 2.0, 6)],
    [("SCHEDULED", 5, 1.0, 0), ("FIRST_TOKEN", 1200, 2.0, 1), ("PREEMPTED", 1200, 3.0, 1), ("FINISHED", 5000, 4.0, 1)],
    [("SCHEDULED", 1, 1.0, 0), ("FINISHED", 2**53, 2.0, 5)],
    [("SCHEDULED", 1, 1.0, 0), ("FIRST_TOKEN", 1024, 2.0, 1), ("FINISHED", 1024, 2.0, 1)],
    [("SCHEDULED", 1, 1.0, 4), ("FINISHED", 40, 2.0, 2**30 - 1)],
]


def test_odd_journeys_never_leave_the_window_they_are_laid_in_and_keep_no_sound_engine_from_being_learned():
    pipeline = new_pipeline()
    for number, marks in enumerate(ODD):
        short = journey(("SCHEDULED", 7, 1.5, 0), ("FINISHED", 9, 1.6, 2), name="k")
        for span in (journey(*marks), short):
            pipeline.process([export(Piece(f"bad-{number}", CORE_SCOPE, span))])
    healthy = run_engine(many_jobs(60, seed=9), start_ns=MONO_NS + 123_456_789)
    for one in exports_of(pieces(healthy, instance="sound", facts=(("vllm.model", "sound"),))):
        pipeline.process([one])
    pipeline.flush()
    (config,) = [each for each in pipeline.snapshot(1, 1).configs if each.config.get("model") == "sound"]
    features = {each.name: each.coefficient for each in config.targets["step_time"].models["portable"].features}
    assert features["prefill_tokens"] == pytest.approx(45.0, rel=1e-3)


def ended(number: int) -> CoreSpan:
    """A request of one step whose API half never comes."""
    ns = MONO_NS + number * 10**6
    marks = (
        SpanEvent(SpanEventKind.QUEUED, number, ns - 1000, 0),
        SpanEvent(SpanEventKind.SCHEDULED, number + 1, ns, 0),
        SpanEvent(SpanEventKind.FINISHED, number + 1, ns, 1),
    )
    offset_ns, ids = UNIX_NS - MONO_NS, number.to_bytes(8, "big")
    return CoreSpan(ids, ids, 10, marks, Finish.LENGTH, offset_ns, ns + offset_ns)


def test_open_requests_are_capped_and_the_oldest_evicted(monkeypatch):
    monkeypatch.setattr(Config, "requests_max", 500)
    # Nothing is ever old enough to be final: they all wait for their API half.
    joiner = Joiner(Config(allowed_lateness_s=1e6, join_timeout_s=1e6))
    for start in range(0, 10_000, 100):
        joiner.add(Telemetry("engine", {}, core=[ended(number) for number in range(start, start + 100)]))
        joiner.drain()
        assert joiner.pending().requests <= 500
    assert joiner.take_counts()[table.JOIN_EVENTS, JoinEvent.OPEN_REQUESTS_EVICTED] >= 2 * 9500
    waits = [each.rows for each in joiner.drain(flush=True) if isinstance(each, Rows) and each.target == "queue_wait"]
    assert min(rows.end_ns.min() for rows in waits) == ended(9500).end_unix_ns


def test_request_spans_held_are_bounded(monkeypatch):
    monkeypatch.setattr(Config, "requests_max", 500)
    pipeline = new_pipeline()
    spans = (stock_span(f"r{n}", n * 1e-3, prompt=5, outputs=5, ttft_s=0.1, decode_s=0.2) for n in range(5000))
    pipeline.process([export(*(Piece("api", STOCK_SCOPE, span) for span in spans))])
    assert pipeline.joiner.pending().requests <= 1000


@pytest.mark.parametrize(("apart_s", "refused", "evicted"), [(0.001, 36, 0), (2.0, 0, 36)])
def test_engines_beyond_the_cap_take_the_place_of_those_that_are_gone(apart_s, refused, evicted):
    """While all are alive, newcomers are refused."""
    pipeline = new_pipeline(engines_max=4, join_timeout_s=5, allowed_lateness_s=1)
    for number in range(40):
        run = run_engine(many_jobs(8), start_ns=MONO_NS + int(number * apart_s * 1e9))
        pipeline.process([export(Piece(f"engine-{number}", STEP_SCOPE, step_span(run, 1, 100)))])
    counts = pipeline.take_counts()
    assert (counts[table.SIZE, "engines"], counts[table.LIMIT_EXCEEDED, "engines"]) == (4, refused)
    assert counts[table.JOIN_EVENTS, JoinEvent.ENGINE_EVICTED] == counts[table.DROPPED_ROWS, RowDrop.IDLE] == evicted
    pipeline.emit_idle(1 << 62)
    assert pipeline.take_counts()[table.LIMIT_EXCEEDED, "engines"] == 0


# --- the life of an engine ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gap_s", "asynchronous", "clock_restarts"),
    [(2.0, False, False), (2.0, True, True), (60.0, False, True), (60.0, True, False)],
)
def test_a_restart_with_the_same_instance_id_joins_no_step_across_it(gap_s, asynchronous, clock_restarts):
    before = run_engine(many_jobs(60), asynchronous=asynchronous)
    end_ns = before.summaries[-1]["step.ts_end_ns"] + int(gap_s * 1e9)
    start_ns = 5 * 10**9 if clock_restarts else end_ns
    offset_ns = before.offset_ns + end_ns - start_ns
    after = run_engine(many_jobs(50, seed=3), start_ns=start_ns, offset_ns=offset_ns, asynchronous=asynchronous)
    pipeline = replayed(exports_of(pieces(before) + pieces(after), 5))
    counts = pipeline.take_counts()
    events = (JoinEvent.ENGINE_RESTART, JoinEvent.DUPLICATE, JoinEvent.STEP_MISMATCHED)
    assert [counts[table.JOIN_EVENTS, event] for event in events] == [1, 0, 0]
    found = step_coefficients(pipeline)
    assert found["intercept"] == pytest.approx(7000, rel=2e-3)
    assert found["prefill_tokens"] == pytest.approx(45, rel=1e-3)
