"""The exporter against a live receiver: prompt, bounded, patient, and honest about what it lost."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time

import grpc
import pytest
from tracefit_vllm.encode import STEP_KEYS
from tracefit_vllm.exporter import Exporter
from tracefit_vllm.facts import resource_attributes
from tracefit_vllm.items import StepRow
from tracefit_vllm.settings import Settings
from tracefit_vllm.tap import Tap

from tests.plugin.fakes import Request, Scheduler, drive
from tests.plugin.receiver import Receiver, attributes


def varint(number):
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def row(step):
    return StepRow(1_700_000_000_000_000_000 + step, 1, (step, *range(1, len(STEP_KEYS))))


@pytest.fixture
def make_exporter():
    made = []

    def make(target, **settings):
        exporter = Exporter(Settings(**{"target": target, "interval_s": 0.02, **settings}), {"service.name": "test"})
        made.append(exporter)
        return exporter

    yield make
    for exporter in made:
        exporter.stop(0.2)


def steps(receiver):
    return [attributes(event)["step.id"] for event in receiver.events("step.BATCH_SUMMARY")]


def test_an_event_arrives_with_nothing_behind_it_to_push_it_out(receiver, make_exporter):
    assert Settings().interval_s < 0.5
    exporter = make_exporter(receiver.target, interval_s=Settings().interval_s)
    exporter.offer(row(1))
    receiver.wait(lambda r: steps(r) == [1])


def test_all_events_arrive_once_and_in_order(receiver, make_exporter):
    exporter = make_exporter(receiver.target)
    for step in range(1, 3001):
        exporter.offer(row(step))
    receiver.wait(lambda r: len(r.events()) == 3000)
    assert steps(receiver) == list(range(1, 3001))
    assert exporter.drops() == {}
    assert max(len(span.events) for span in receiver.spans()) <= 256


def test_stop_sends_what_is_queued(receiver, make_exporter):
    exporter = make_exporter(receiver.target, interval_s=30.0)
    exporter.offer(row(1))
    exporter.stop(10.0)
    receiver.wait(lambda r: len(r.events()) == 1)


def refusing(calls, code, delay_s=None):
    """Refuse the first calls with this code; a RetryInfo in the trailer as the Python SDK reads it."""

    def behave(number, context):
        if number <= calls:
            if delay_s is not None:
                nanos = int(delay_s * 1e9)
                duration = b"\x10" + varint(nanos)
                info = b"\x0a" + varint(len(duration)) + duration
                context.set_trailing_metadata((("google.rpc.retryinfo-bin", info),))
            context.abort(code, "not now")

    return behave


def test_a_receiver_that_is_exhausted_for_a_while_gets_everything_once(make_exporter):
    receiver = Receiver(refusing(12, grpc.StatusCode.RESOURCE_EXHAUSTED, delay_s=0.05))
    try:
        exporter = make_exporter(receiver.target)
        for step in range(1, 601):
            exporter.offer(row(step))
        receiver.wait(lambda r: len(r.events()) == 600)
        assert steps(receiver) == list(range(1, 601))
        assert receiver.refused == 12
        assert exporter.drops() == {}
    finally:
        receiver.close()


def test_while_the_receiver_refuses_the_queue_stays_bounded_and_the_newest_steps_survive(make_exporter):
    opened = threading.Event()

    def behave(_, context):
        if not opened.is_set():
            context.abort(grpc.StatusCode.UNAVAILABLE, "later")

    receiver = Receiver(behave)
    try:
        exporter = make_exporter(receiver.target, queue_items=200)
        for step in range(1, 5001):
            exporter.offer(row(step))
        assert len(exporter._queue) <= 200
        opened.set()
        receiver.wait(lambda r: 5000 in steps(r))
        lost = exporter.drops()["queue_full"]
        assert lost + len(steps(receiver)) == 5000
        exporter.offer(row(5001))
        receiver.wait(lambda r: 5001 in steps(r))
        assert attributes(receiver.spans()[-1])["plugin.queue_full"] == lost
        assert sum(span.dropped_events_count for span in receiver.spans()) == lost
    finally:
        receiver.close()


def test_a_refusal_for_good_is_counted_and_said_once(make_exporter, caplog):
    receiver = Receiver(refusing(3, grpc.StatusCode.UNAUTHENTICATED))
    try:
        with caplog.at_level(logging.WARNING, "vllm.plugins.tracefit"):
            exporter = make_exporter(receiver.target)
            for step in range(4):
                exporter.offer(row(step))
                deadline = time.monotonic() + 100
                while not receiver.requests and receiver.refused <= step and time.monotonic() < deadline:
                    time.sleep(0.005)
            receiver.wait(lambda r: r.requests)
        assert exporter.drops() == {"export_failed": 3}
        assert attributes(receiver.spans()[-1])["plugin.export_failed"] == 3
        assert sum("UNAUTHENTICATED" in message for message in caplog.messages) == 1
    finally:
        receiver.close()


@pytest.mark.parametrize("behaviour", ["absent", "hanging"])
def test_an_endpoint_that_is_absent_or_hangs_changes_nothing_for_the_engine(behaviour):
    """The hang is a socket that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if behaviour == "absent":
            listener.close()
        scheduler = Scheduler()
        settings = Settings(target=f"127.0.0.1:{port}", queue_items=500, interval_s=0.02)
        exporter = Exporter(settings, resource_attributes(scheduler, settings))
        tap = Tap(scheduler, settings, exporter, random.Random(1))
        assert tap.attach()
        for number in range(8):
            scheduler.add_request(Request(f"r{number}", 50, 2000))
        for _ in range(2000):
            scheduler.update_from_output(scheduler.schedule(), "outputs")
        assert len(scheduler.truth) == 2000
        assert len(exporter._queue) <= 500
        assert tap.errors == 0
        scheduler.shutdown()
        assert scheduler.shut_down


def test_headers_reach_the_receiver(receiver, make_exporter):
    exporter = make_exporter(receiver.target, headers=(("authorization", "Bearer x"),))
    exporter.offer(row(1))
    receiver.wait(lambda r: r.requests)
    assert receiver.metadata[0]["authorization"] == "Bearer x"
    assert receiver.metadata[0]["user-agent"].startswith("tracefit-vllm/")


def test_gzip_is_understood_by_an_ordinary_receiver(receiver, make_exporter):
    exporter = make_exporter(receiver.target, gzip=True)
    exporter.offer(row(1))
    receiver.wait(lambda r: len(r.events()) == 1)


def test_a_live_run_ends_with_steps_and_journeys_at_the_receiver(receiver):
    scheduler = Scheduler()
    settings = Settings(target=receiver.target, interval_s=0.02)
    exporter = Exporter(settings, resource_attributes(scheduler, settings))
    tap = Tap(scheduler, settings, exporter, random.Random(1))
    assert tap.attach()
    parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    scheduler.add_request(Request("a", 30, 4, trace_headers={"traceparent": parent}))
    scheduler.add_request(Request("b", 30, 4, trace_headers={"traceparent": "00-zz-1"}))
    drive(scheduler, 6)
    scheduler.shutdown()
    receiver.wait(lambda r: len(r.spans("vllm.scheduler")) == 2)
    assert steps(receiver) == [1, 2, 3, 4, 5, 6]
    by_id = {attributes(span)["gen_ai.request.id"]: span for span in receiver.spans("vllm.scheduler")}
    assert by_id["a"].trace_id == bytes.fromhex("ab" * 16)
    assert by_id["a"].parent_span_id == bytes.fromhex("cd" * 8)
    assert by_id["b"].parent_span_id == b""
    assert any(by_id["b"].trace_id)
    for span in by_id.values():
        assert [e.name.partition(".")[2] for e in span.events] == ["QUEUED", "SCHEDULED", "FIRST_TOKEN", "FINISHED"]
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        found = attributes(span.events[-1])
        assert found["ts.monotonic"] == pytest.approx(found["ts.monotonic_ns"] / 1e9)
        assert abs(span.end_time_unix_nano - time.time_ns()) < 60e9
