"""The columnar decoder equals the plain one, and takes the fast path where it should."""

from itertools import islice

import pytest

from collector.telemetry import Skip, table
from tests.support import otlp_bytes as otlp
from tests.support.decode_oracle import SPANS_EACH, assert_same, decode_in_columns
from tests.support.recordings import all_recordings, messages

RECORDINGS = [pytest.param(path, id=f"{path.parent.parent.name}-{path.parent.name}") for path in all_recordings()]


@pytest.mark.parametrize("path", RECORDINGS)
def test_every_recording_decodes_as_the_plain_decoder_has_it_and_without_its_help(path):
    """The first exports of each: what comes later is of the same sender."""
    payloads = [(message, f"peer-{number % 3}") for number, message in enumerate(islice(messages(path), 20))]
    assert assert_same(payloads)[table.DECODED_SUMMARIES, "plain"] == 0
    for payload in payloads[:3]:
        assert_same([payload])


def test_several_exports_decode_together_and_one_that_is_damaged_harms_itself_only():
    good = [otlp.steps_export([otlp.summary(n) for n in range(70)], span_id=bytes([i] * 8)) for i in range(3)]
    broken_event = otlp.steps_export([otlp.summary(1), otlp.summary(2)[:-1]], span_id=b"brokenev")
    payloads = [(good[0], "a"), (good[1][:-3], "b"), (b"", "c"), (broken_event, "d"), (good[1], "e"), (good[2], "f")]
    assert assert_same(payloads)[table.DECODED_SUMMARIES, "columnar"] == 210
    got, _, _ = decode_in_columns(payloads)
    assert [one.peer for one in got] == ["a", "e", "f"]


def test_a_sender_whose_summaries_are_of_another_form_keeps_no_other_from_theirs():
    good = [otlp.summary(5, otlp.PLUGIN_KEYS) for _ in range(100)]
    shorter = [otlp.summary(5, otlp.PLUGIN_KEYS[1:]) for _ in range(100)]
    as_long = [event.replace(b"step.id", b"step.iD") for event in good]
    for strange in (shorter, as_long):
        counts = assert_same([(otlp.steps_export([*strange, *good]), "peer")])
        assert counts[table.DECODED_SUMMARIES, "columnar"] == 100


def test_an_export_of_which_something_does_not_decode_is_counted_with_its_spans():
    unread, counts, _ = decode_in_columns([(otlp.export(("fastapi", [b"\x2a\x01\xff"])), "peer")])  # a name, no UTF-8
    assert unread == []
    assert dict(counts.by_label(table.DECODED_SPANS)) == {Skip.UNDECODABLE: SPANS_EACH}
