"""Whatever comes in is counted with a reason and teaches nothing; what is sound goes on being learned."""

from __future__ import annotations

import math
import tracemalloc

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from collector.config.schema import Config
from collector.decode.records import CoreSpan, Finish, Mark, MarkKind, Telemetry
from collector.ingest.queue import Export
from collector.join.joiner import Joiner
from collector.telemetry import table
from collector.telemetry.reasons import JoinEvent, RowDrop, Skip
from tests.support.pipelines import assert_accounted, coefficients, new_pipeline, replayed, step_coefficients
from tests.support.step_exports import attribute
from tests.support.toy_engine import MONO_NS, UNIX_NS, Job, many_jobs, run_engine
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
    return Export(export_of(group).SerializeToString(), "peer", "test", len(group))


def assert_sound(pipeline) -> None:
    """State and snapshot hold finite numbers."""
    values = coefficients(pipeline)
    assert all(math.isfinite(value) and value >= 0 for value in values.values()), values
    pipeline.snapshot(1, 1).to_json()


def assert_still_learns(pipeline, instance: str = "sound") -> None:
    """The bad input before it does not keep a healthy engine from being learned exactly."""
    healthy = run_engine(many_jobs(60, seed=9), start_ns=MONO_NS + 123_456_789)
    for one in exports_of(pieces(healthy, instance=instance, facts=(("vllm.model", instance),))):
        pipeline.process([one])
    pipeline.flush()
    found = {
        name: value
        for (_, target, name), value in coefficients_of_model(pipeline, instance).items()
        if target == "step_time"
    }
    assert found["prefill_tokens"] == pytest.approx(45.0, rel=1e-3)
    assert_sound(pipeline)


def coefficients_of_model(pipeline, model: str):
    ids = {c.config_id for c in pipeline.snapshot(0, 1).configs if c.config.get("model") == model}
    return {key: value for key, value in coefficients(pipeline).items() if key[0] in ids}


def changed(span: Span, key: str, value: object, *, event: int | None = None) -> Span:
    """A copy of a span with one attribute of it, or of one of its events, replaced (None: removed)."""
    out = Span()
    out.CopyFrom(span)
    for holder in out.events if event is None else [out.events[event]]:
        for index, old in enumerate(holder.attributes):
            if old.key == key:
                del holder.attributes[index]
                break
        if value is not None:
            holder.attributes.append(attribute(key, value))
    return out


def left_out(*group: Piece):
    """Counts after these pieces, each in an export of its own."""
    pipeline = new_pipeline()
    pipeline.process([export(piece) for piece in group])
    pipeline.flush()
    counts = pipeline.take_counts()
    assert_accounted(counts, *(piece.span for piece in group))
    return counts


STEP_INTS = ("step.id", "step.ts_start_ns", "batch.num_decode_reqs", "batch.prefill_tokens", "kv.blocks_free_gpu")
NO_COUNT = {
    None: Skip.MISSING_ATTRIBUTE,
    "12": Skip.INVALID,
    12.5: Skip.INVALID,
    True: Skip.INVALID,
    b"12": Skip.INVALID,
    -5: Skip.OUT_OF_RANGE,
    HUGE: Skip.OUT_OF_RANGE,
    -(2**63): Skip.OUT_OF_RANGE,
}


@pytest.mark.parametrize("value", NO_COUNT)
def test_what_is_no_count_costs_a_step_its_event_and_a_journey_its_span(sound, value):
    reason, journey_of = NO_COUNT[value], core_span(sound, sound.jobs[3])
    for key in STEP_INTS:
        counts = left_out(Piece("bad", STEP_SCOPE, changed(step_span(sound, 1, 20), key, value)))
        assert (counts[table.DECODED_EVENTS, reason], counts[table.DECODED_SPANS, table.ACCEPTED]) == (20, 1)
    for key in ("ts.monotonic_ns", "scheduler.step", "decode.done_tokens", "prefill.total_tokens"):
        counts = left_out(Piece("bad", CORE_SCOPE, changed(journey_of, key, value, event=1)))
        assert counts.by_label(table.DECODED_SPANS) == {reason: 1}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_ratio_that_is_no_number_is_not_finite(sound, value):
    counts = left_out(Piece("bad", STEP_SCOPE, changed(step_span(sound, 1, 9), "kv.usage_gpu_ratio", value)))
    assert counts[table.DECODED_EVENTS, Skip.INVALID] == 9


@pytest.mark.parametrize("unix", [0, 1, 2**64 - 1, 2**63])
def test_an_event_without_a_credible_wall_clock_is_out_of_range(sound, unix):
    for scope, span in ((STEP_SCOPE, step_span(sound, 1, 5)), (CORE_SCOPE, core_span(sound, sound.jobs[0]))):
        for event in span.events:
            event.time_unix_nano = unix
        assert left_out(Piece("bad", scope, span))[table.DECODED_EVENTS, Skip.OUT_OF_RANGE] == len(span.events)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"start_time_unix_nano": 0, "end_time_unix_nano": 0}, Skip.OUT_OF_RANGE),
        ({"start_time_unix_nano": 1, "end_time_unix_nano": 2**64 - 1}, Skip.OUT_OF_RANGE),
        ({"start_time_unix_nano": UNIX_NS + 1, "end_time_unix_nano": UNIX_NS}, Skip.INVALID),
        # ids are remembered for ten minutes: their length bounds the memory that takes
        *(({"span_id": b"x" * length}, Skip.OUT_OF_RANGE) for length in (0, 7, 9, 4096)),
        ({"attributes": [attribute("k", 1)] * 129}, Skip.INVALID),
        ({"attributes": [attribute("k", 1)] * 10_000}, Skip.INVALID),
        ({"attributes": [attribute("k", 1)] * 250_000}, Skip.UNDECODABLE),  # refused before they are parsed
    ],
)
def test_a_span_with_impossible_times_ids_or_attributes_is_refused(sound, change, reason):
    span = step_span(sound, 1, 5)
    for name in change.keys() - {"attributes"}:
        setattr(span, name, change[name])
    span.attributes.extend(change.get("attributes", ()))
    assert left_out(Piece("bad", STEP_SCOPE, span)).by_label(table.DECODED_SPANS) == {reason: 1}


def test_an_event_and_a_resource_with_too_many_attributes_lose_them_alone(sound):
    flood, span = [attribute("k", 1)] * 10_000, step_span(sound, 4, 6)
    span.events[0].attributes.extend(flood)
    assert left_out(Piece("bad", STEP_SCOPE, span))[table.DECODED_EVENTS, Skip.INVALID] == 1
    request = export_of([Piece("many", STEP_SCOPE, step_span(sound, 7, 9))])
    request.resource_spans[0].resource.attributes.extend(flood)
    pipeline = new_pipeline()
    pipeline.process([Export(request.SerializeToString(), "peer", "test", 1)])
    assert pipeline.take_counts()[table.DECODED_EVENTS, table.ACCEPTED] == 3


def test_the_largest_number_everywhere_teaches_nothing(sound):
    pipeline = new_pipeline()
    spans = [
        (STEP_SCOPE, step_span(sound, 1, 50)),
        (CORE_SCOPE, core_span(sound, sound.jobs[0])),
        (API_SCOPE, api_span(sound, sound.jobs[0])),
        (STOCK_SCOPE, stock_span("a", 0.0, prompt=10, outputs=10, ttft_s=1.0, decode_s=1.0)),
    ]
    for scope, span in spans:
        for holder in (span, *span.events):
            for one in holder.attributes:
                if one.value.WhichOneof("value") == "int_value":
                    one.value.int_value = HUGE
                elif one.value.WhichOneof("value") == "double_value":
                    one.value.double_value = float(HUGE)
        pipeline.process([export(Piece("bad", scope, span))])
    assert pipeline.learned_rows == 0
    assert_still_learns(pipeline)


@pytest.mark.parametrize("value", [-1, -2, 2**31])
def test_a_negative_or_huge_token_count_of_a_request_span_is_out_of_range(value):
    span = stock_span("a", 0.0, prompt=value, outputs=10, ttft_s=1.0, decode_s=1.0)
    assert left_out(Piece("bad", STOCK_SCOPE, span)).by_label(table.DECODED_SPANS) == {Skip.OUT_OF_RANGE: 1}


@pytest.mark.parametrize("outputs", [10**6, 2**31 - 1])
def test_a_request_of_a_billion_tokens_takes_no_memory(outputs):
    pipeline = new_pipeline()
    pipeline.process(
        [export(Piece("bad", STOCK_SCOPE, stock_span("a", 0.0, prompt=5, outputs=outputs, ttft_s=1.0, decode_s=9.0)))]
    )
    tracemalloc.start()
    pipeline.flush()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 64 << 20
    assert pipeline.take_counts()[table.DROPPED_ROWS, RowDrop.TOO_LONG] == 1


# --- journeys that cannot have happened ---------------------------------------------------------------------------


def journey(*marks: tuple[str, int, float, int], prompt: int = 100, name: str = "j", status: str = "length") -> Piece:
    """(kind, step, seconds, output tokens) ..."""
    span = Span(name="llm_core", span_id=span_id(name), trace_id=b"t" * 16, start_time_unix_nano=UNIX_NS)
    for kind, step, at_s, done in marks:
        ns = int(at_s * 1e9)
        event = span.events.add(name=f"journey.{kind}", time_unix_nano=UNIX_NS + ns)
        put(
            event,
            {
                "ts.monotonic_ns": MONO_NS + ns,
                "scheduler.step": step,
                "decode.done_tokens": done,
                "prefill.total_tokens": prompt,
            },
        )
        if kind == "FINISHED":
            put(event, {"finish.status": status})
    span.end_time_unix_nano = max(event.time_unix_nano for event in span.events)
    return Piece("bad", CORE_SCOPE, span)


@pytest.mark.parametrize(
    ("marks", "reason"),
    [
        ([("QUEUED", 1, 1.0, 0), ("SCHEDULED", 2, 0.5, 0)], Skip.INVALID),
        ([("FINISHED", 5, 1.0, 3), ("FIRST_TOKEN", 5, 2.0, 3)], Skip.INVALID),
        ([("SCHEDULED", 2, 1.0, 0), ("QUEUED", 2, 2.0, 0)], Skip.INVALID),
        ([("SCHEDULED", 9, 1.0, 0), ("FIRST_TOKEN", 3, 2.0, 1)], Skip.INVALID),
        ([("SCHEDULED", 2, 1.0, 7), ("FINISHED", 9, 2.0, 3)], Skip.INVALID),
        ([("SCHEDULED", 2, 1.0, 0), ("SCHEDULED", 3, 2.0, 0)], Skip.INVALID),
        ([("unknown", 2, 1.0, 0)], Skip.FOREIGN),
    ],
)
def test_a_journey_in_impossible_order_is_refused(marks, reason):
    assert left_out(journey(*marks)).by_label(table.DECODED_SPANS) == {reason: 1}


@pytest.mark.parametrize(
    "marks",
    [
        [("SCHEDULED", 5, 1.0, 0), ("PREEMPTED", 6, 2.0, 0), ("SCHEDULED", 10**12, 3.0, 0)],
        [("SCHEDULED", 5, 1.0, 0), ("PREEMPTED", 5, 2.0, 0), ("SCHEDULED", 900, 3.0, 0), ("FINISHED", 901, 4.0, 0)],
        [("SCHEDULED", 5, 1.0, 0), ("PREEMPTED", 6, 2.0, 0), ("FINISHED", 10**9, 3.0, 0)],
        [("QUEUED", 0, 0.5, 0), ("FIRST_TOKEN", 10**9, 1.0, 1), ("FINISHED", 10**9 + 5, 2.0, 6)],
        [("SCHEDULED", 5, 1.0, 0), ("FIRST_TOKEN", 70_000, 2.0, 1), ("PREEMPTED", 70_000, 3.0, 1)],
        [
            ("SCHEDULED", 5, 1.0, 0),
            ("FIRST_TOKEN", 1200, 2.0, 1),
            ("PREEMPTED", 1200, 3.0, 1),
            ("FINISHED", 5000, 4.0, 1),
        ],
        [("SCHEDULED", 1, 1.0, 0), ("FINISHED", 2**53, 2.0, 5)],
        [("SCHEDULED", 1, 1.0, 0), ("FIRST_TOKEN", 1024, 2.0, 1), ("FINISHED", 1024, 2.0, 1)],
        [("SCHEDULED", 1, 1.0, 4), ("FINISHED", 40, 2.0, 2**31 - 1)],
    ],
)
def test_an_odd_journey_never_leaves_the_window_it_is_laid_in(marks):
    pipeline = new_pipeline()
    pipeline.process([export(journey(*marks))])
    pipeline.process([export(journey(("SCHEDULED", 7, 1.5, 0), ("FINISHED", 9, 1.6, 2), name="k"))])
    pipeline.flush()
    assert_still_learns(pipeline)


def test_a_request_that_never_ends_holds_steps_for_the_window_only():
    # One job runs from the first step to the last and its journey never comes.
    jobs = [Job("endless", 10, 10**6, 1), *many_jobs(150, spacing=10)]
    run = run_engine(jobs, steps_max=1500)
    ends_s = (run.summaries[-1]["step.ts_start_ns"] - run.summaries[0]["step.ts_start_ns"]) / 1e9
    window_s = ends_s / 3
    some = [
        p
        for p in pieces(run, apis=False)
        if p.scope == STEP_SCOPE or p.span.span_id != core_span(run, run.jobs[0]).span_id
    ]
    pipeline = new_pipeline(join_timeout_s=window_s, allowed_lateness_s=1.0)
    for one in exports_of(some, 3):
        pipeline.process([one])
    counts = pipeline.take_counts()
    assert counts[table.JOIN_EVENTS, JoinEvent.STEP_MISMATCHED] > 500
    assert counts.total(table.ROWS) > 500
    (engine,) = pipeline.joiner.engines.values()
    assert engine.processes[0].emitted_to > len(run.summaries) / 2


# --- bounds -------------------------------------------------------------------------------------------------------


def ended(number: int) -> CoreSpan:
    """A request of one step whose API half never comes."""
    ns = MONO_NS + number * 10**6
    marks = (Mark(MarkKind.SCHEDULED, number + 1, ns, 0), Mark(MarkKind.FINISHED, number + 1, ns, 1))
    offset_ns, ids = UNIX_NS - MONO_NS, number.to_bytes(8, "big")
    return CoreSpan(ids, ids, "", 10, marks, Finish.LENGTH, offset_ns, ns + offset_ns)


def test_open_requests_are_capped_and_the_oldest_evicted(monkeypatch):
    monkeypatch.setattr(Config, "requests_max", 500)
    # Nothing is ever old enough to be final: they all wait for their API half.
    joiner = Joiner(Config(allowed_lateness_s=1e6, join_timeout_s=1e6))
    for start in range(0, 10_000, 100):
        joiner.add(Telemetry("engine", {}, core=[ended(number) for number in range(start, start + 100)]))
        joiner.drain()
        assert sum(pending.requests for pending in joiner.pending()) <= 500
        assert len(joiner.api_spans._waiting) <= 500
    assert joiner.take_counts()[table.JOIN_EVENTS, JoinEvent.OPEN_REQUESTS_EVICTED] >= 2 * 9500
    (engine,) = joiner.engines.values()
    assert min(request.last_step for request in engine.processes[0].requests) > 9500


def test_children_without_end_of_one_request_are_bounded(monkeypatch):
    monkeypatch.setattr(Config, "requests_max", 100)
    pipeline = new_pipeline()
    group = []
    for number in range(1000):
        at = 1.0 + number * 1e-3
        piece = journey(("SCHEDULED", number + 1, at, 0), ("FINISHED", number + 1, at, 1), name=f"child {number}")
        piece.span.parent_span_id = b"parent!!"
        group.append(piece)
    pipeline.process([export(*group)])
    assert sum(len(waiting) for waiting in pipeline.joiner.api_spans._waiting.values()) <= 100


def test_request_spans_held_are_bounded(monkeypatch):
    monkeypatch.setattr(Config, "requests_max", 500)
    pipeline = new_pipeline()
    group = [
        Piece("api", STOCK_SCOPE, stock_span(f"r{n}", n * 1e-3, prompt=5, outputs=5, ttft_s=0.1, decode_s=0.2))
        for n in range(5000)
    ]
    pipeline.process([export(*group)])
    assert sum(pending.requests for pending in pipeline.joiner.pending()) <= 1000
    pipeline.flush()
    assert_sound(pipeline)


@pytest.mark.parametrize(("apart_s", "refused", "evicted"), [(0.001, 36, 0), (2.0, 0, 36)])
def test_engines_beyond_the_cap_take_the_place_of_those_that_are_gone(apart_s, refused, evicted):
    """And nothing of those stays; while all are alive, newcomers are refused."""
    pipeline = new_pipeline(engines_max=4, join_timeout_s=5, allowed_lateness_s=1)
    for number in range(40):
        run = run_engine(many_jobs(8), start_ns=MONO_NS + int(number * apart_s * 1e9))
        pipeline.process([export(Piece(f"engine-{number}", STEP_SCOPE, step_span(run, 1, 100)))])
    joiner = pipeline.joiner
    assert len(joiner.engines) <= 4
    assert joiner.emitters_held <= 4
    counts = pipeline.take_counts()
    assert counts[table.JOIN_EVENTS, JoinEvent.ENGINE_EVICTED] == evicted
    assert counts[table.SIZE, "engines"] == 4
    assert counts[table.NO_PLACE, "engines"] == refused


# --- the life of an engine ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap_s", [2.0, 60.0])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("clock_restarts", [False, True])
def test_a_restart_with_the_same_instance_id_joins_no_step_across_it(gap_s, asynchronous, clock_restarts):
    before = run_engine(many_jobs(60), asynchronous=asynchronous)
    end_ns = before.summaries[-1]["step.ts_end_ns"] + int(gap_s * 1e9)
    start_ns = 5 * 10**9 if clock_restarts else end_ns
    offset_ns = before.offset_ns + end_ns - start_ns
    after = run_engine(many_jobs(50, seed=3), start_ns=start_ns, offset_ns=offset_ns, asynchronous=asynchronous)
    pipeline = replayed(exports_of(pieces(before) + pieces(after), 5))
    counts = pipeline.take_counts()
    assert counts[table.JOIN_EVENTS, JoinEvent.ENGINE_RESTART] == 1
    assert counts[table.JOIN_EVENTS, JoinEvent.DUPLICATE] == 0
    assert counts[table.JOIN_EVENTS, JoinEvent.STEP_MISMATCHED] == 0
    found = step_coefficients(pipeline)
    assert found["intercept"] == pytest.approx(7000, rel=2e-3)
    assert found["prefill_tokens"] == pytest.approx(45, rel=1e-3)
    assert_sound(pipeline)


def test_a_clock_that_goes_back_gives_no_row(sound):
    span = step_span(sound, 1, 300)
    for index, event in enumerate(span.events):
        for one in event.attributes:
            if one.key in ("step.ts_start_ns", "step.ts_end_ns") and index >= 150:
                one.value.int_value -= 900_000_000_000
    pipeline = new_pipeline()
    pipeline.process([export(Piece("back", STEP_SCOPE, span))])
    pipeline.flush()
    assert pipeline.take_counts()[table.DROPPED_ROWS, RowDrop.TIME_ORDER] == 1
    assert_sound(pipeline)


def test_a_wall_clock_that_goes_back_does_not_stop_the_engine(sound):
    everything = pieces(sound)
    half = len(everything) // 2
    for piece in everything[half:]:
        piece.span.start_time_unix_nano -= 3600 * 10**9
        piece.span.end_time_unix_nano -= 3600 * 10**9
        for event in piece.span.events:
            event.time_unix_nano -= 3600 * 10**9
    pipeline = replayed(exports_of(everything, 5))
    counts = pipeline.take_counts()
    assert counts[table.DECODED_SPANS, Skip.LATE] == 0
    assert counts.total(table.ROWS) > 0
