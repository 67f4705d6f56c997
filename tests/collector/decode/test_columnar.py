"""The columnar decoder equals the plain one, and takes the fast path where it should."""

from __future__ import annotations

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.decode import vocabulary as words
from collector.decode.columnar import CHUNK, Decoder
from collector.decode.known_templates import TEMPLATES_MAX, WALKS_MAX
from collector.decode.template import EVENT_MAX, KEY_MAX, shape
from collector.telemetry import table
from tests.support import otlp_bytes as otlp
from tests.support.decode_oracle import assert_same, decode_in_columns
from tests.support.recordings import all_recordings, messages

RECORDINGS = [pytest.param(path, id=f"{path.parent.parent.name}-{path.parent.name}") for path in all_recordings()]


@pytest.mark.parametrize("path", RECORDINGS)
def test_every_recording_decodes_as_the_plain_decoder_has_it_and_without_its_help(path):
    payloads = [(message, f"peer-{number % 3}") for number, message in enumerate(messages(path))]
    counts = assert_same(payloads)
    assert counts[table.DECODED_SUMMARIES, "plain"] == 0
    one_by_one = Decoder()
    for payload in payloads:
        assert_same([payload], one_by_one)


@pytest.mark.parametrize("keys", [otlp.SUMMARY_KEYS, otlp.PLUGIN_KEYS, otlp.SUMMARY_KEYS[::-1]])
@pytest.mark.parametrize("count", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_any_number_of_events_of_any_layout_takes_the_fast_path(keys, count):
    export = otlp.steps_export([otlp.summary(step, keys, prefill=step % 900) for step in range(count)])
    counts = assert_same([(export, "peer")])
    assert counts[table.DECODED_SUMMARIES, "columnar"] == count


def test_two_layouts_may_alternate():
    events = [otlp.summary(n, otlp.PLUGIN_KEYS if n % 2 else otlp.SUMMARY_KEYS) for n in range(300)]
    assert assert_same([(otlp.steps_export(events), "peer")])[table.DECODED_SUMMARIES, "columnar"] == 300


def test_snapshots_between_the_summaries_leave_the_fast_path_alone():
    events = [otlp.snapshot(n) if n % 3 else otlp.summary(n) for n in range(300)]
    counts = assert_same([(otlp.steps_export(events), "peer")])
    assert (
        counts[table.DECODED_SUMMARIES, "columnar"],
        counts[table.DECODED_SUMMARIES, "plain"],
        counts[table.DECODED_EVENTS_OK],
    ) == (100, 0, 300)


def test_several_exports_decode_together_and_one_that_is_damaged_harms_itself_only():
    good = [otlp.steps_export([otlp.summary(n) for n in range(70)], span_id=bytes([i] * 8)) for i in range(3)]
    broken_event = otlp.steps_export([otlp.summary(1), otlp.summary(2)[:-1]], span_id=b"brokenev")
    payloads = [(good[0], "a"), (good[1][:-3], "b"), (b"", "c"), (broken_event, "d"), (good[1], "e"), (good[2], "f")]
    assert assert_same(payloads)[table.DECODED_SUMMARIES, "columnar"] == 210
    got, _, _ = decode_in_columns(payloads)
    assert [one is None for one in got] == [False, True, False, True, False, False]


def test_a_repeated_span_is_refused_before_its_events_count_as_read():
    export = otlp.steps_export([otlp.summary(n) for n in range(50)])
    counts = assert_same([(export, "peer"), (export, "peer")])
    assert (counts[table.DECODED_SUMMARIES, "columnar"], counts[table.SKIPPED_EVENTS, "duplicate"]) == (50, 50)


def _with(step=5, **values):
    return otlp.summary(step, **{key.replace("__", "."): value for key, value in values.items()})


ODDITIES = {
    "negative": _with(batch__num_finished=-1),
    "nine_byte_varint": _with(step__ts_start_ns=1 << 57, step__ts_end_ns=1 << 57),
    "largest_time": _with(step__ts_start_ns=1 << 55, step__ts_end_ns=(1 << 56) - 1),
    "over_the_limit": _with(queue__running_depth=1 << 31),
    "at_the_limit": _with(queue__running_depth=(1 << 31) - 1),
    "step_id_at_the_limit": _with(step__id=1 << 53),
    "step_id_over_the_limit": _with(step__id=(1 << 53) + 1),
    "ratio_one": _with(kv__usage_gpu_ratio=1.0),
    "ratio_above_one": _with(kv__usage_gpu_ratio=float(np.nextafter(1.0, 2.0))),
    "ratio_minus_zero": _with(kv__usage_gpu_ratio=-0.0),
    "ratio_negative": _with(kv__usage_gpu_ratio=-0.5),
    "ratio_nan": _with(kv__usage_gpu_ratio=float("nan")),
    "ratio_infinite": _with(kv__usage_gpu_ratio=float("inf")),
    "ratio_is_an_int": _with(kv__usage_gpu_ratio=1),
    "int_is_a_double": _with(step__id=5.0),
    "int_is_a_bool": _with(step__id=True),
    "int_is_a_string": _with(step__id="5"),
    "empty_value": _with(step__id=b""),
    "two_values_in_one": _with(step__id=b"\x18\x05\x18\x06"),
    "two_long_values_in_one": _with(step__id=b"\x18" + otlp.varint(1 << 50) + b"\x18\x06"),
    "two_doubles_in_one": _with(kv__usage_gpu_ratio=otlp.any_value(0.5) + otlp.any_value(0.25)),
    "tag_without_value": _with(step__id=b"\x18"),
    "unfinished_varint": _with(step__id=b"\x18\x85"),
    "eleven_byte_varint": _with(step__id=b"\x18" + b"\xff" * 10 + b"\x01"),
    "array_value": _with(step__id=b"\x2a\x00"),
    "end_before_start": _with(step__ts_end_ns=1),
    "tokens_do_not_add_up": _with(batch__scheduled_tokens=99),
    "more_free_than_there_are": _with(kv__blocks_free_gpu=3000),
    "missing_attribute": otlp.summary(5, otlp.SUMMARY_KEYS[1:]),
    "no_attributes": otlp.event([]),
    "no_time": otlp.summary(5)[9:],
    "time_zero": otlp.event([], unix_ns=0),
    "time_too_early": b"\x09" + (words.UNIX_MIN - 1).to_bytes(8, "little") + otlp.summary(5)[9:],
    "time_earliest": b"\x09" + words.UNIX_MIN.to_bytes(8, "little") + otlp.summary(5)[9:],
    "time_latest": b"\x09" + words.UNIX_MAX.to_bytes(8, "little") + otlp.summary(5)[9:],
    "time_too_late": b"\x09" + (words.UNIX_MAX + 1).to_bytes(8, "little") + otlp.summary(5)[9:],
    "time_twice": otlp.summary(5) + b"\x09" + otlp.EPOCH_NS.to_bytes(8, "little"),
    "attributes_before_the_name": otlp.summary(5)[29:] + otlp.summary(5)[:29],
    "name_twice": otlp.summary(5) + otlp.field(2, b"other"),
    "foreign_name": otlp.event([], "step.OTHER"),
    "longer_name": otlp.event([otlp.attribute("step.id", 1)], "step.BATCH_SUMMARY2"),
    "name_ends_otherwise": otlp.summary(5).replace(b"SUMMARY", b"SUMMARX"),
    "name_differs_in_the_middle": otlp.summary(5).replace(b"BATCH", b"BATHC"),
    "time_of_another_field": b"\x11" + otlp.summary(5)[1:],
    "dropped_attributes": otlp.summary(5) + b"\x20\x03",
    "unknown_field": otlp.summary(5) + b"\x78\x01",
    "unknown_group": otlp.summary(5) + b"\x7b\x08\x01\x7c",
    "field_number_zero": otlp.summary(5) + b"\x02\x00",
    "a_byte_missing": otlp.summary(5)[:-1],
    "a_byte_too_many": otlp.summary(5) + b"\x00",
    "empty": b"",
    "time_only": otlp.summary(5)[:9],
    "head_only": otlp.summary(5)[:29],
    "long_length": otlp.event([b"\x1a\xff\xff\xff\x0f"]),
    "length_beyond_the_end": otlp.summary(5)[:30] + b"\xfd" + otlp.summary(5)[31:],
    "every_length_beyond_the_end": otlp.summary(5).replace(b"\x1a", b"\x1a\xfd"),
    "nothing_but_lengths": otlp.summary(5)[:29] + b"\xfd" * 300,
    "attribute_twice": otlp.summary(5) + otlp.attribute("step.id", 77),
    "unknown_attribute": otlp.summary(5) + otlp.attribute("plugin.hook_ns", 1 << 40),
    "unknown_attribute_negative": otlp.summary(5) + otlp.attribute("plugin.hook_ns", -1),
    "unknown_attribute_not_finite": otlp.summary(5) + otlp.attribute("plugin.load", float("nan")),
    "unknown_string": otlp.summary(5) + otlp.attribute("plugin.version", "1.0"),
    "unknown_string_not_utf8": otlp.summary(5) + otlp.attribute("plugin.version", b"\x0a\x01\xff"),
    "key_not_utf8": otlp.summary(5) + otlp.field(3, otlp.field(1, b"ab\xffd") + otlp.field(2, b"\x18\x01")),
    "key_of_one_byte": otlp.summary(5) + otlp.attribute("x", 1),
    "key_of_two_bytes": otlp.summary(5) + otlp.attribute("xy", 1),
    "key_of_three_bytes": otlp.summary(5) + otlp.attribute("xyz", 1),
    "key_of_ten_bytes": otlp.summary(5) + otlp.attribute("abcdefghij", 1),
    "key_of_eleven_bytes": otlp.summary(5) + otlp.attribute("abcdefghijk", 1),
    "longest_key": otlp.summary(5) + otlp.attribute("k" * KEY_MAX, 1 << 50),
    "too_long_a_key": otlp.summary(5) + otlp.attribute("k" * (KEY_MAX + 1), 1),
    "key_empty": otlp.summary(5) + otlp.attribute("", 1),
    "very_many_attributes": otlp.summary(5) + b"".join(otlp.attribute(f"extra.{n}", n) for n in range(20)),
    "too_many_attributes": otlp.summary(5) + b"".join(otlp.attribute(f"extra.{n}", n) for n in range(128)),
    "too_long_an_event": otlp.summary(5) + otlp.attribute("plugin.text", "x" * EVENT_MAX),
    "value_before_key": otlp.summary(5, otlp.SUMMARY_KEYS[1:])
    + otlp.field(3, otlp.field(2, b"\x18\x05") + otlp.field(1, b"step.id")),
    "key_twice": otlp.summary(5, otlp.SUMMARY_KEYS[1:])
    + otlp.field(3, otlp.field(1, b"other") + otlp.field(1, b"step.id") + otlp.field(2, b"\x18\x05")),
}
LONG_FORMS = {
    f"long_form_{width}": otlp.event(
        [otlp.attribute(key, value, width) for key, value in otlp.step_values(5).items() if key in otlp.SUMMARY_KEYS]
    )
    for width in range(2, 11)
}


@pytest.mark.parametrize("name", [*ODDITIES, *LONG_FORMS])
@pytest.mark.parametrize("place", [0, 100, 199])
def test_an_odd_event_is_read_as_the_plain_decoder_reads_it_wherever_it_stands(name, place):
    events = [otlp.summary(n) for n in range(200)]
    events[place] = (ODDITIES | LONG_FORMS)[name]
    assert_same([(otlp.steps_export(events), "peer")])


def test_odd_events_one_behind_the_other_do_not_borrow_bytes_of_their_neighbours():
    whole = otlp.summary(5)
    halves = [piece for cut in range(0, len(whole), 7) for piece in (whole[:cut], whole[cut:])]
    for first, second in zip(halves[::2], halves[1::2], strict=True):
        assert_same([(otlp.steps_export([first, second, whole]), "peer")])


def test_each_kind_of_limit_leaves_an_event_to_the_plain_decoder():
    left = [name for name, event in ODDITIES.items() if _columnar_share(event) == 0]
    taken = set(ODDITIES) - set(left)
    assert {"at_the_limit", "largest_time", "time_earliest", "time_latest", "ratio_one", "unknown_attribute"} <= taken
    assert {"ratio_minus_zero", "nine_byte_varint", "unknown_string", "attribute_twice", "key_not_utf8"} <= set(left)


def _columnar_share(event):
    _, counts, _ = decode_in_columns([(otlp.steps_export([event]), "peer")])
    return counts[table.DECODED_SUMMARIES, "columnar"]


def test_templates_remembered_are_bounded_and_forgetting_them_changes_nothing():
    decoder, most = Decoder(), 0
    for n in range(TEMPLATES_MAX):
        keys = (*otlp.SUMMARY_KEYS[n % 16 :], *otlp.SUMMARY_KEYS[: n % 16], f"extra.{n}")
        events = [otlp.summary(i, keys, **{f"extra.{n}": 1 << 7 * (i % 5)}) for i in range(20)]
        counts = assert_same([(otlp.steps_export(events), "peer")], decoder)
        assert counts[table.DECODED_SUMMARIES, "columnar"] == 20
        most = max(most, len(decoder._templates))
    assert TEMPLATES_MAX - WALKS_MAX < most < TEMPLATES_MAX + WALKS_MAX


def test_events_of_one_size_that_differ_in_where_their_values_end_are_told_apart():
    late, early = ({"batch.context_tokens": 1 << at, "batch.attn_pairs": 1 << 25 - at} for at in (5, 20))
    events = [otlp.summary(5, otlp.PLUGIN_KEYS, **values) for values in [early, late, late, early] * 20]
    assert len({*map(len, events)}) == 1
    assert assert_same([(otlp.steps_export(events), "peer")])[table.DECODED_SUMMARIES, "columnar"] == 80


def test_of_more_shapes_than_one_chunk_has_time_for_the_rest_has_its_turn_in_the_next():
    widths = [(a, b, c) for a in range(8) for b in range(8) for c in range(2)]
    keys = ("plugin.hook_ns", "plugin.prev_hook_ns", "batch.attn_pairs")
    events = [
        otlp.summary(5, otlp.PLUGIN_KEYS, **{key: 1 << 7 * at for key, at in zip(keys, each, strict=True)})
        for each in widths
    ]
    decoder, payload = Decoder(), otlp.steps_export(events)
    first, second = (assert_same([(payload, "peer")], decoder) for _ in range(2))
    assert first[table.DECODED_SUMMARIES, "columnar"] == WALKS_MAX
    assert second[table.DECODED_SUMMARIES, "columnar"] == len(events) == 2 * WALKS_MAX


def test_a_sender_whose_summaries_no_template_reads_keeps_no_other_from_theirs():
    good = [otlp.summary(5, otlp.PLUGIN_KEYS) for _ in range(100)]
    shorter = [otlp.summary(5, otlp.PLUGIN_KEYS[1:]) for _ in range(100)]
    as_long = [event.replace(b"step.id", b"step.iD") for event in good]
    for strange in (shorter, as_long):
        decoder = Decoder()
        counts = assert_same([(otlp.steps_export([*strange, *good]), "peer")], decoder)
        assert counts[table.DECODED_SUMMARIES, "columnar"] >= 98
        counts = assert_same([(otlp.steps_export([*strange, *good]), "peer")], decoder)
        assert counts[table.DECODED_SUMMARIES, "columnar"] == 100


def test_a_sender_of_ever_new_layouts_gets_the_plain_decoder():
    events = [otlp.summary(5) + otlp.attribute(f"extra.{n}", n) for n in range(64)]
    counts = assert_same([(otlp.steps_export(events), "peer")])
    assert counts[table.DECODED_SUMMARIES, "plain"] >= 60


def test_other_scopes_and_what_a_span_holds_beside_its_events_stay_as_they_are():
    span = otlp.step_span(
        [otlp.summary(1)], tail=b"\x50\x03\x60\x17\x7a\x02\x12\x00\x85\x01\x00\x01\x00\x00\x98\x06\x01"
    )
    foreign = otlp.export(("fastapi", [span]), ("vllm.scheduler.step", [span, span]), ("vllm.scheduler", [span]))
    counts = assert_same([(foreign, "peer")])
    assert (counts[table.DECODED_SUMMARIES, "columnar"], counts[table.SDK_DROPPED_EVENTS]) == (1, 4 * 0x17)


def test_spans_of_foreign_scopes_are_counted_and_left_out():
    ours = otlp.step_span([otlp.summary(1)])
    export = otlp.export(("fastapi", [b"", otlp.step_span([b"", b""])]), ("vllm.scheduler.step", [ours]))
    counts = assert_same([(export, "peer")])
    assert counts[table.DECODED_SPANS] == 3
    assert counts[table.SKIPPED_SPANS, "foreign_scope"] == 2
    assert counts[table.SKIPPED_EVENTS, "foreign_scope"] == 2
    assert counts[table.DECODED_SUMMARIES, "columnar"] == 1
    dropped = [b"", b"\x60\x05\x60\x03", b"\x62\x02\x01\x02"]  # field 12: absent, twice, and with another wire type
    counts = assert_same([(otlp.export(("fastapi", [*dropped, *dropped]), ("flask", dropped)), "peer")])
    assert (counts[table.DECODED_SPANS], counts[table.SDK_DROPPED_EVENTS]) == (9, 3 * 3)
    broken = b"\x2a\x01\xff"  # a name that is no UTF-8
    unread, counts, _ = decode_in_columns([(otlp.export(("fastapi", [broken]), ("vllm.scheduler", [ours])), "peer")])
    assert unread == [None]
    assert counts[table.DECODED_SPANS] == 0, "who counts a whole export counts it once"


def test_nesting_is_as_deep_as_the_plain_decoder_allows():
    for depth in range(20, 60):
        value = b"\x10\x01"
        for _ in range(depth):
            value = otlp.field(5, otlp.field(1, value))
        odd = otlp.summary(5) + otlp.field(3, otlp.field(1, b"deep") + otlp.field(2, value))
        assert_same([(otlp.steps_export([odd, otlp.summary(6)]), "peer")])


def test_the_hand_made_summary_is_what_the_schema_writes():
    export = otlp.steps_export([otlp.summary(5)])
    parsed = ExportTraceServiceRequest.FromString(export)
    assert parsed.SerializeToString() == export
    assert len(shape(otlp.summary(5)).layout) == 16
