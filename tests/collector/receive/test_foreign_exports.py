"""Exports of foreign spans lose them on the way in, and what is counted of them is the same."""

from __future__ import annotations

import msgspec
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from collector.config import DedupeConfig
from collector.decode import foreign
from collector.decode import vocabulary as words
from collector.decode.envelope import SlimExport
from collector.decode.foreign import _KNOWN_PREFIX, Envelope, ForeignSpans
from collector.durable import journal_records
from collector.durable.journal import Journal
from collector.receive import count
from collector.receive.admission import AdmissionQueue
from collector.receive.count import count_spans, open_envelope
from collector.receive.export_request import Export
from collector.receive.intake import FOREIGN_BYTES, Intake
from collector.telemetry import Counts
from collector.telemetry.metrics import Metrics
from collector.telemetry.reasons import Outcome, Transport
from collector.worker.correlator import TelemetryReader
from tests.support import otlp_bytes as otlp
from tests.support.clocks import FakeClock
from tests.support.decode_oracle import comparable, decode_plainly, whoever_read

FOREIGN = ("fastapi", "telemetrygen", "", "vllm.other", "xvllm.scheduler.step")
NOT_UTF8 = otlp.field(1, otlp.attribute("service.name", b"\x0a\x01\xff", number=1))
SPAN = otlp.step_span([b"", b""])
LONG = SPAN + otlp.attribute("text", "x" * 2000, number=9)
NAMED = otlp.step_span([], tail=otlp.attribute("library", words.STEP_SCOPE, number=9))
KNOWN_SPANS = (words.CORE_SPAN, words.REQUEST_SPAN, words.STEP_SPAN_PREFIX, words.KV_SPAN_PREFIX)
GROUP = b"\x9b\x06\x0b\x0c\x08\x01\x9c\x06"
"""Of number 99, with another one and a number in it."""
RESOURCE = otlp.field(
    1, b"".join(otlp.attribute(key, "one", number=1) for key in (words.INSTANCE, *sorted(words.FACT_KEYS), "host.name"))
)


def with_resource(resource, *scopes):
    """An export of one resource, given as the bytes of its field."""
    return otlp.field(1, resource + b"".join(otlp.field(2, _scope_spans(name, spans)) for name, spans in scopes))


def _scope_spans(name, spans):
    return otlp.field(1, otlp.field(1, name.encode())) + b"".join(otlp.field(2, span) for span in spans)


ALONE = {
    "spans with events": otlp.export(("fastapi", [SPAN, SPAN, b""])),
    "several scopes and resources": otlp.export(("fastapi", [SPAN]), ("", [b""])) + otlp.export(("flask", [SPAN] * 3)),
    "a resource with facts": with_resource(RESOURCE, ("fastapi", [SPAN])),
    "a resource behind its scopes": otlp.field(1, otlp.field(2, _scope_spans("fastapi", [SPAN])) + RESOURCE),
    "more attributes than are read": with_resource(
        otlp.field(1, b"".join(otlp.attribute(f"key.{n}", n, number=1) for n in range(200))), ("fastapi", [SPAN])
    ),
    "a resource that does not decode": with_resource(NOT_UTF8, ("fastapi", [SPAN, SPAN])),
    "a known scope's name in an attribute": otlp.export(("fastapi", [LONG, NAMED])),
    "spans that do not decode": otlp.export(("fastapi", [b"\x2a\x01\xff", SPAN])),
    "unknown fields everywhere": otlp.field(
        1, otlp.field(2, _scope_spans("fastapi", [SPAN + b"\x98\x06\x01"]) + b"\xba\x3e\x01a") + b"\xba\x3e\x02ab"
    )
    + b"\xba\x3e\x03abc",
    "groups": otlp.field(1, otlp.field(2, _scope_spans("fastapi", [SPAN + GROUP, GROUP]) + GROUP) + GROUP) + GROUP,
    "lengths in more bytes than they need": b"\x8a\x00\x8b\x80\x00" + otlp.field(2, _scope_spans("a", [b""] * 2)),
    "a scope in two halves": otlp.field(
        1, otlp.field(2, otlp.field(1, otlp.field(1, b"fastapi")) + otlp.field(2, SPAN) + otlp.field(1, b""))
    ),
    "names of known spans": otlp.export(("fastapi", [otlp.field(5, name.encode()) for name in KNOWN_SPANS])),
    "many": otlp.export(("fastapi", [LONG] * 500)),
}
BESIDE_OTHERS = {
    "a known scope without spans": otlp.export(("fastapi", [SPAN]), (words.STEP_SCOPE, [])),
    "steps": otlp.export(("fastapi", [SPAN]), (words.STEP_SCOPE, [otlp.step_span([otlp.summary(1)])])),
    "steps far behind": otlp.export(("fastapi", [LONG]), (words.STEP_SCOPE, [SPAN])),
    "lost events": otlp.export(("fastapi", [SPAN + b"\x60\x05\x60\x03", SPAN])),
    "lost events as bytes": otlp.export(("fastapi", [SPAN + b"\x62\x02\x01\x02"])),
    "lost events as odd bytes": otlp.export(("fastapi", [SPAN + b"\x62\x01\xff"])),
    "a known scope's name in an early attribute": otlp.export(("fastapi", [SPAN, NAMED])),
    "a fact early on": with_resource(
        otlp.field(1, otlp.attribute("vllm.tp_size", 2, number=1)), ("fastapi", [SPAN] * 2)
    ),
    "a scope named twice": otlp.field(
        1, otlp.field(2, otlp.field(1, otlp.field(1, b"fastapi")) + _scope_spans(words.STEP_SCOPE, [SPAN]))
    ),
}


def admitted(payload):
    """The export as the worker takes it out of the queue, and its weight there."""
    queue = AdmissionQueue(FakeClock(), capacity_bytes=1 << 30, wait_s=0, waiters_max=1)
    assert Intake(queue, Metrics(CollectorRegistry())).offer(payload, "peer", Transport.GRPC) is None
    (export,) = queue.take(1 << 30, 0).items
    return export, queue.in_flight_bytes


def read(export):
    """What the worker reads, and what it counts."""
    counts = Counts()
    reader = TelemetryReader(DedupeConfig())
    told = [comparable(telemetry) for batch in reader.read([export], counts) for _, telemetry in batch]
    return told, whoever_read(counts), reader.foreign_scopes


def assert_read_alike(payload):
    """Stripped, whole, and by the plain decoder; returns what entered the queue."""
    export, _ = admitted(payload)
    assert export.spans == sum(
        len(scope.items) for each in SlimExport.FromString(payload).items for scope in each.items
    )
    told, counts, scopes = read(export)
    assert (told, counts, scopes) == read(Export(payload, "peer", Transport.GRPC, export.spans))
    (plainly,), plain_counts, _ = decode_plainly([(payload, "peer")])
    if plainly is not None:
        assert (told, counts) == ([comparable(each) for each in plainly], whoever_read(plain_counts))
    return export


def holds_spans(export):
    return any(scope.items for resource in SlimExport.FromString(export.payload).items for scope in resource.items)


@pytest.mark.parametrize("payload", ALONE.values(), ids=ALONE)
def test_foreign_spans_alone_stay_outside_and_are_counted_as_if_each_had_been_read(payload):
    export = assert_read_alike(payload)
    assert not holds_spans(export)
    assert export.foreign.spans == export.spans > 0


@pytest.mark.parametrize("payload", BESIDE_OTHERS.values(), ids=BESIDE_OTHERS)
def test_what_takes_a_closer_look_enters_as_it_came(payload):
    export = assert_read_alike(payload)
    assert (export.payload, export.foreign) == (payload, ForeignSpans())


def test_exports_that_are_read_at_once_are_read_alike_stripped_or_whole():
    payloads = [*ALONE.values(), *BESIDE_OTHERS.values()]

    def told(exports):
        counts = Counts()
        batches = TelemetryReader(DedupeConfig()).read(exports, counts)
        return [comparable(telemetry) for batch in batches for _, telemetry in batch], whoever_read(counts)

    stripped = [admitted(payload)[0] for payload in payloads]
    assert told(stripped) == told([
        export._replace(payload=payload, foreign=ForeignSpans())
        for export, payload in zip(stripped, payloads, strict=True)
    ])  # fmt: skip


scopes = st.tuples(
    st.sampled_from([*FOREIGN, *sorted(words.KNOWN_SCOPES)]), st.lists(st.sampled_from([SPAN, NAMED, b""]), max_size=3)
)
resources = st.sampled_from([b"", RESOURCE, NOT_UTF8, otlp.field(1, b"")])
some_exports = st.lists(
    st.builds(lambda r, s: with_resource(r, *s), resources, st.lists(scopes, max_size=3)), max_size=3
)


@given(some_exports.map(b"".join))
def test_any_mixture_is_read_alike(payload):
    if count_spans(payload):
        assert_read_alike(payload)


def is_export(payload):
    try:
        SlimExport.FromString(payload)
    except DecodeError:
        return False
    return True


def test_wherever_an_export_is_cut_or_damaged_the_verdict_is_that_of_the_whole_envelope():
    whole = ALONE["several scopes and resources"] + ALONE["unknown fields everywhere"]
    damaged = [whole[:at] for at in range(len(whole))]
    damaged += [
        whole[:at] + bytes([byte]) + whole[at + 1 :] for at in range(len(whole)) for byte in (0, 0x0B, 0x62, 0xFF)
    ]
    verdicts = [isinstance(open_envelope(payload), Outcome) for payload in damaged]
    assert verdicts == [not is_export(payload) for payload in damaged]
    assert {True, False} == {*verdicts}
    for payload, refused in zip(damaged, verdicts, strict=True):
        if not refused and count_spans(payload):
            assert_read_alike(payload)


def test_scopes_without_spans_are_gone_through_once(monkeypatch):
    monkeypatch.delattr(foreign, "SlimExport")  # nobody asks for its scopes a second time
    payload = otlp.field(1, otlp.field(2, b"") * 1000) + otlp.export(("fastapi", []))
    assert open_envelope(payload) == Envelope(0, payload)


def test_an_export_that_is_walked_first_loses_its_foreign_spans_too(monkeypatch):
    monkeypatch.setattr(count, "SMALL_BYTES", -1)
    export = assert_read_alike(ALONE["spans with events"])
    assert export.foreign == ForeignSpans(3, 4)


def test_what_is_left_weighs_in_the_queue_what_it_takes_in_memory():
    payload = ALONE["many"]
    export, weight = admitted(payload)
    assert weight == len(export.payload) + FOREIGN_BYTES < len(payload) / 100
    _, weight = admitted(BESIDE_OTHERS["steps"])
    assert weight == len(BESIDE_OTHERS["steps"])


def test_all_known_scopes_begin_with_what_is_looked_for():
    assert all(scope.encode().startswith(_KNOWN_PREFIX) for scope in words.KNOWN_SCOPES)


def test_the_journal_keeps_what_was_counted(tmp_path):
    export, _ = admitted(ALONE["spans with events"])
    journal = Journal(tmp_path, capacity_bytes=1 << 20, segment_bytes=4096, fsync=False)
    journal.open(0)
    written = journal.append(export)
    journal.close()
    again = Journal(tmp_path, capacity_bytes=1 << 20, segment_bytes=4096, fsync=False)
    again.open(0)
    assert list(again.entries(0)) == [written]
    assert written.foreign == ForeignSpans(3, 4)


def test_entries_of_earlier_versions_have_lost_no_spans_and_those_of_later_ones_can_be_read():
    for extra in ([], [ForeignSpans(3, 4), 5, "new"]):
        entry = journal_records._meta_decoder.decode(msgspec.msgpack.encode(["peer", "grpc", 3, *extra]))
        assert (entry.spans, entry.foreign) == (3, extra[0] if extra else ForeignSpans())
