"""Whatever bytes come, the columnar decoder says what the plain one says."""

from __future__ import annotations

import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from collector.decode.columnar import Decoder
from collector.telemetry import table
from tests.support import otlp_bytes as otlp
from tests.support.decode_oracle import assert_same

ODDITIES = ("order", "missing", "double", "unknown", "value", "long", "tail")
edges = st.sampled_from([0, 1, 127, 128, 1 << 31, (1 << 31) + 1, 1 << 53, (1 << 53) + 1, 1 << 56, 1 << 62, -1])
integers = st.one_of(edges, st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 3000))
doubles = st.one_of(st.sampled_from([0.0, -0.0, 1.0, 0.5]), st.floats())
strange_values = st.one_of(doubles, st.booleans(), st.text(max_size=8), st.binary(max_size=12), integers)


@st.composite
def events(draw):
    """A summary with some of: other order, missing, doubled, unknown, odd attributes, long varints, a cut, a tail."""
    step = draw(st.integers(1, 1 << 22))
    keys = list(draw(st.sampled_from([otlp.SUMMARY_KEYS, otlp.SUMMARY_KEYS, otlp.PLUGIN_KEYS])))
    values = otlp.step_values(step, prefill=draw(st.integers(0, 4096)), decode=draw(st.integers(0, 300)))
    width = 0
    tail = b""
    for oddity in draw(st.lists(st.sampled_from(ODDITIES), max_size=2)):
        match oddity:
            case "order":
                keys = draw(st.permutations(keys))
            case "missing":
                keys.remove(draw(st.sampled_from(keys)))
            case "double":
                keys.append(draw(st.sampled_from(keys)))
            case "unknown":
                key = draw(st.text(max_size=70))
                values[key] = draw(strange_values)
                keys.insert(draw(st.integers(0, len(keys))), key)
            case "value":
                values[draw(st.sampled_from(keys))] = draw(st.one_of(integers, strange_values))
            case "long":
                width = draw(st.integers(2, 10))
            case "tail":
                tail = draw(st.binary(max_size=6))
    unix_ns = draw(st.sampled_from([otlp.EPOCH_NS + step, otlp.EPOCH_NS, 0, (1 << 64) - 1]))
    whole = otlp.event([otlp.attribute(key, values[key], width) for key in keys], unix_ns=unix_ns, tail=tail)
    return whole[: draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))]


step_events = st.one_of(events(), st.builds(otlp.summary, st.integers(1, 1000)), st.builds(otlp.snapshot, st.just(3)))
shared = Decoder()


@settings(max_examples=120, deadline=None)
@given(st.lists(step_events, max_size=12))
def test_events_of_any_make_decode_alike(made):
    assert_same([(otlp.steps_export(made), "peer")])
    assert_same([(otlp.steps_export([event]), "peer") for event in made], shared)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4000), st.integers(0, 255), st.sampled_from(["set", "drop", "add", "double"])),
        min_size=1,
        max_size=4,
    )
)
def test_damaged_exports_decode_alike(damages):
    whole = bytearray(otlp.steps_export([otlp.summary(n) for n in range(6)] + [otlp.snapshot(3)]))
    for place, byte, how in damages:
        at = place % len(whole)
        match how:
            case "set":
                whole[at] = byte
            case "drop":
                del whole[at]
            case "add":
                whole.insert(at, byte)
            case "double":
                whole[at:at] = whole[at : at + byte]
    assert_same([(bytes(whole), "peer"), (otlp.steps_export([otlp.summary(9)]), "peer")], shared)


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_decode_alike(data):
    assert_same([(data, "peer"), (otlp.field(1, otlp.field(2, data)), "peer")], shared)
    assert_same([(otlp.steps_export([data, otlp.summary(1), data]), "peer")], shared)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, (1 << 56) - 1), min_size=1, max_size=30))
def test_varints_of_every_width_come_out_whole(times):
    made = [
        otlp.summary(5, otlp.PLUGIN_KEYS, **{"step.ts_done_ns": time, "batch.attn_pairs": time >> 3}) for time in times
    ]
    counts = assert_same([(otlp.steps_export(made), "peer")], shared)
    assert counts[table.DECODED_SUMMARIES, "columnar"] == len(times)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=30))
def test_doubles_of_every_bit_pattern_are_judged_alike(patterns):
    made = [
        otlp.summary(5, **{"kv.usage_gpu_ratio": struct.unpack("<d", struct.pack("<Q", bits))[0]}) for bits in patterns
    ]
    assert_same([(otlp.steps_export(made), "peer")], shared)
