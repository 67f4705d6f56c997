"""Events of request spans read by their shape: as the plain decoder reads them, or not at all."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from collector.decode import vocabulary as words
from collector.decode.columnar import Decoder
from collector.decode.envelope import SlimExport
from collector.decode.records import Finish, MarkKind
from collector.decode.request_events import (
    ATTRIBUTES_MAX,
    EVENT_MAX,
    SHAPES_MAX,
    WALKS_MAX,
    ApiTemplate,
    JourneyTemplate,
    KnownShapes,
)
from collector.decode.request_spans import core_moments
from tests.support.decode_oracle import assert_same
from tests.support.otlp_load import Stream
from tests.support.recordings import all_recordings, messages, payloads

RECORDINGS = [pytest.param(path, id=f"{path.parent.parent.name}-{path.parent.name}") for path in all_recordings()]
TEMPLATES = {words.CORE_SCOPE: JourneyTemplate, words.API_SCOPE: ApiTemplate}


def request_spans(payload, scope):
    resources = SlimExport.FromString(payload).items
    return [span for r in resources for s in r.items if s.scope.name == scope for span in s.items]


def toy_export(**settings):
    return Stream(3, requests=True, pool_rpcs=1, spans_per_rpc=3, **settings).export(0).payload


@pytest.mark.parametrize("path", RECORDINGS)
@pytest.mark.parametrize("scope", TEMPLATES)
def test_every_request_of_a_recording_is_read_but_those_that_say_what_is_wrong(path, scope):
    known, left = KnownShapes(TEMPLATES[scope]), 0
    for payload in messages(path):
        known.begin_batch()
        left += sum(known.read(span.events) is None for span in request_spans(payload, scope))
    assert left == 0


def changed(payload, change, scope=words.CORE_SCOPE):
    """The export after a change of the first event of a scope."""
    export = ExportTraceServiceRequest.FromString(payload)
    spans = [s for r in export.resource_spans for s in r.scope_spans if s.scope.name == scope]
    change(spans[0].spans[0].events[0])
    return export.SerializeToString()


def attribute(event, key):
    return next(each for each in event.attributes if each.key == key)


def sets(key, **value):
    def change(event):
        for kind, said in value.items():
            setattr(attribute(event, key).value, kind, said)

    return change


def adds(key, **value):
    def change(event):
        said = event.attributes.add(key=key)
        for kind, each in value.items():
            setattr(said.value, kind, each)

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(
            sets(key, int_value=value)
            for key, field in words.JOURNEY_FIELDS.items()
            for value in (0, 127, 128, 1 << 20, field.limit - 1, field.limit, field.limit + 1, -1)
        ),
        *(sets(key, double_value=1.0) for key in words.JOURNEY_FIELDS),
        *(adds(key, int_value=5) for key in words.JOURNEY_FIELDS),
        adds("phase", string_value="WAITING"),
        adds("phase", string_value="größer"),
        adds("phase", bytes_value=b"\xff"),
        adds("phase", bool_value=True),
        adds("phase"),
        adds("größe", int_value=1),
        adds("long", string_value="x" * 127),
        adds("long", string_value="x" * EVENT_MAX),
        lambda event: setattr(event, "time_unix_nano", words.UNIX_MIN - 1),
        lambda event: setattr(event, "time_unix_nano", words.UNIX_MAX + 1),
        lambda event: setattr(event, "time_unix_nano", words.UNIX_MIN),
        lambda event: setattr(event, "time_unix_nano", 0),
        lambda event: setattr(event, "name", "journey.UNHEARD_OF"),
        lambda event: setattr(event, "name", "journey.FINISHED"),
        lambda event: setattr(event, "name", ""),
        lambda event: setattr(event, "dropped_attributes_count", 1),
        lambda event: event.attributes.pop(),
        lambda event: event.ClearField("attributes"),
        lambda event: [adds(f"key {n}", int_value=n)(event) for n in range(ATTRIBUTES_MAX)],
        lambda event: [adds(f"key {n}", int_value=n)(event) for n in range(words.ATTRIBUTES_MAX)],
    ],
)
def test_whatever_a_journey_says_both_decoders_agree(change):
    payload = toy_export()
    decoder = Decoder()
    assert_same([(payload, "a")], decoder)
    assert_same([(changed(payload, change), "a")], decoder)
    assert_same([(changed(payload, change), "a")])


@pytest.mark.parametrize(
    "change",
    [
        *(
            sets(words.API_TIME, double_value=value)
            for value in (0.0, -0.0, -1e-9, 1e9, words.TIME_MAX / 1e9, 1e300, math.inf, -math.inf, math.nan)
        ),
        sets(words.API_TIME, int_value=3),
        sets(words.API_TIME, string_value="3"),
        sets(words.API_TIME, bool_value=True),
        adds(words.API_TIME, double_value=7.0),
        adds("other", string_value="ASCII"),
        lambda event: setattr(event, "name", "api.UNHEARD_OF"),
        lambda event: setattr(event, "name", "api.ABORTED"),
        lambda event: event.ClearField("attributes"),
    ],
)
def test_whatever_an_api_server_says_both_decoders_agree(change):
    payload = toy_export()
    decoder = Decoder()
    assert_same([(payload, "a")], decoder)
    assert_same([(changed(payload, change, words.API_SCOPE), "a")], decoder)


EVENTS = [
    (scope, bytes(event))
    for payload in (*payloads("c3_preempt"), toy_export())
    for scope in TEMPLATES
    for span in request_spans(payload, scope)
    for event in span.events
]


def export_of(scope, events):
    """An export of one span, of events as bytes."""
    export = ExportTraceServiceRequest()
    spans = export.resource_spans.add().scope_spans.add()
    spans.scope.name = scope
    name = words.CORE_SPAN if scope == words.CORE_SCOPE else words.REQUEST_SPAN
    spans.spans.add(span_id=b"12345678", name=name, start_time_unix_nano=1, end_time_unix_nano=words.UNIX_MIN + 5)
    slim = SlimExport.FromString(export.SerializeToString())
    slim.items[0].items[0].items[0].events.extend(events)
    return slim.SerializeToString()


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(EVENTS), st.data())
def test_an_event_damaged_anywhere_is_what_the_plain_decoder_says_it_is(known, data):
    scope, event = known
    damaged = bytearray(event)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(event) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.sampled_from((len(event), data.draw(st.integers(0, len(event))))))
    decoder = Decoder()
    assert_same([(export_of(scope, [event]), "a")], decoder)
    assert_same([(export_of(scope, [bytes(damaged[:end])]), "b")], decoder)


def journey_event(numbers):
    """QUEUED with these varints as its fields."""
    attributes = b"".join(
        bytes([0x1A, len(key) + len(said) + 5, 0x0A, len(key)]) + key + bytes([0x12, len(said) + 1, 0x18]) + said
        for key, said in zip(map(str.encode, words.JOURNEY_FIELDS), numbers, strict=True)
    )
    return Span.Event(time_unix_nano=words.UNIX_MIN, name="journey.QUEUED").SerializeToString() + attributes


@pytest.mark.parametrize("ones", range(len(words.JOURNEY_FIELDS)))
def test_numbers_of_any_width_do_not_reach_into_one_another(ones):
    """All bits of one number but the highest that it may have, each number in one byte to eight."""
    bits = [field.limit.bit_length() - 1 for field in words.JOURNEY_FIELDS.values()]
    known = KnownShapes(JourneyTemplate)
    for widths in itertools.product(range(1, 9), repeat=len(bits)):
        values = [0] * len(bits)
        values[ones] = (1 << min(bits[ones], 7 * widths[ones])) - 1
        event = journey_event(
            bytes([value >> 7 * at & 0x7F | (0x80 if at < width - 1 else 0) for at in range(width)])
            for value, width in zip(values, widths, strict=True)
        )
        known.begin_batch()
        (moment,) = known.read([event])
        assert [moment] == core_moments(Span(events=[Span.Event.FromString(event)]))
        assert [moment.mark.ts_ns, moment.mark.step_id, moment.mark.output_tokens, moment.prompt_tokens] == values


@pytest.mark.parametrize("scope", TEMPLATES)
@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(b"\x1a\x06\x0a\x01k\x12\x01\x0a", id="a text without its length"),
        pytest.param(b"\x1a\x05\x0a\x01k\x12\x00\x0a\x00", id="no value, then a field that looks like a text"),
        pytest.param(b"\x1a\x07\x0a\x01k\x12\x02\x0a\x00", id="an empty text"),
        pytest.param(b"\x1a\x06\x0a\x00\x12\x02\x18\x01", id="an empty key"),
        pytest.param(b"\x1a\x05\x0a\x01k\x12\x00", id="no value"),
        pytest.param(b"\x1a\x03\x0a\x01k", id="no value at all"),
    ],
)
def test_an_event_that_ends_in_an_odd_attribute_harms_no_other_export(scope, odd):
    known = next(event for of, event in EVENTS if of == scope)
    assert_same([(export_of(scope, [known]), "a"), (export_of(scope, [known + odd]), "b")])


@pytest.mark.parametrize(
    ("said", "finish"),
    [("length", Finish.LENGTH), ("stopped", Finish.STOPPED), ("melted", Finish.ERROR), (None, Finish.ERROR)],
)
def test_how_a_request_ended_is_read_from_the_text(said, finish):
    export = ExportTraceServiceRequest()
    event = export.resource_spans.add().scope_spans.add().spans.add().events.add(time_unix_nano=words.UNIX_MIN)
    event.name = f"journey.{MarkKind.FINISHED.name}"
    for key in words.JOURNEY_FIELDS:
        adds(key, int_value=300)(event)
    if said is not None:
        adds(words.FINISH, string_value=said)(event)
    (moment,) = KnownShapes(JourneyTemplate).read([event.SerializeToString()])
    assert moment.finish is finish
    assert (moment.mark.step_id, moment.mark.ts_ns, moment.mark.output_tokens, moment.prompt_tokens) == (300,) * 4


def test_a_span_of_which_one_event_is_odd_is_left_as_it_is():
    export = ExportTraceServiceRequest.FromString(toy_export())
    for spans in export.resource_spans[0].scope_spans:
        if spans.scope.name in TEMPLATES:
            spans.spans[0].events.add(name="exception", time_unix_nano=words.UNIX_MIN)
    assert_same([(export.SerializeToString(), "a")])


def test_spans_keep_their_own_events_between_scopes_said_twice_and_exports_that_do_not_decode():
    """Spans with no events, read and left ones in turn, in both scopes of two resources, twice each."""
    export = ExportTraceServiceRequest()
    for number in range(32):
        if number % 8 == 0:
            resource = export.resource_spans.add()
        scope = (words.CORE_SCOPE, words.API_SCOPE)[number // 2 % 2]
        spans = resource.scope_spans.add()
        spans.scope.name = scope
        for each in range(3):
            name = words.CORE_SPAN if scope == words.CORE_SCOPE else words.REQUEST_SPAN
            span = spans.spans.add(span_id=b"%08d" % (3 * number + each), name=name)
            span.start_time_unix_nano, span.end_time_unix_nano = 1, words.UNIX_MIN + 5
            for of, event in EVENTS[number : number + 9] if (number + each) % 4 else ():
                if of == scope:
                    span.events.add().ParseFromString(event)
            if (number + each) % 3 == 0:
                span.events.add(name="exception")
    payload = export.SerializeToString()
    assert_same([(payload, "a"), (payload[:-1], "b"), (payload, "c"), (b"", "d"), (payload, "e")])


def test_who_sends_ever_new_shapes_is_walked_no_further_in_a_batch_and_fills_no_memory():
    scope, event = EVENTS[0]
    request = export_of(scope, [event])
    known = KnownShapes(TEMPLATES[scope])
    shapes = [changed(request, adds("x" * (n % 60 + 1), string_value="y" * (n // 60)), scope) for n in range(600)]
    read = [known.read(request_spans(each, scope)[0].events) for each in shapes[: WALKS_MAX + 9]]
    assert [each is not None for each in read] == [True] * WALKS_MAX + [False] * 9
    for each in shapes:
        known.begin_batch()
        assert known.read(request_spans(each, scope)[0].events)
        assert len(known) <= SHAPES_MAX
