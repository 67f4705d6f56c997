"""Dense inputs are told from telemetry before they are parsed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collector.decode.weight import SMALL_BYTES, is_too_dense
from collector.receive.count import FIELDS_MAX, count_spans
from collector.telemetry.reasons import Outcome
from tests.support import otlp_bytes as otlp

TWO_MIB = 2 << 20


def in_span(content):
    return otlp.field(1, otlp.field(2, otlp.field(2, content)))


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a\x00" * (TWO_MIB // 2),
        otlp.field(1, otlp.field(1, b"\x0a\x00" * (TWO_MIB // 2))),
        in_span(otlp.field(11, b"\x1a\x00" * (TWO_MIB // 2))),
        in_span(otlp.field(11, otlp.field(3, otlp.field(2, otlp.field(5, b"\x0a\x00" * (TWO_MIB // 2)))))),
        in_span(b"\x6a\x00" * (TWO_MIB // 2)),
    ],
)
def test_empty_messages_by_the_million_are_too_dense_wherever_they_are(data):
    assert is_too_dense(data)


def test_telemetry_of_any_size_is_not():
    events = [otlp.summary(n) + otlp.attribute("text", "no template") for n in range(6000)]
    export = otlp.export(*[("vllm.scheduler.step", [otlp.step_span(events)])] * 2)
    assert len(export) > 4 * SMALL_BYTES
    assert not is_too_dense(export)


@settings(max_examples=6, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_do_not_decode_are_left_to_the_parser(data):
    is_too_dense(bytes(SMALL_BYTES) + data)
    is_too_dense(otlp.field(1, data * (SMALL_BYTES // max(len(data), 1) + 1)))


def test_small_inputs_are_not_looked_at():
    assert not is_too_dense(b"\x0a\x00" * (SMALL_BYTES // 2 - 1))


def test_the_envelope_counts_events_of_large_exports_only():
    few = in_span(b"\x5a\x00" * 1000)
    many = in_span(b"\x5a\x00" * (FIELDS_MAX + 1))
    assert count_spans(few) == 1
    assert count_spans(many) is Outcome.TOO_MANY_FIELDS
    assert count_spans(b"\x10\x00" * (FIELDS_MAX + 1)) is Outcome.TOO_MANY_FIELDS
