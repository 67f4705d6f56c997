"""Hostile and broken clients against the real sidecar: it stays up, bounded, and open to everybody else."""

from __future__ import annotations

import contextlib
import gc
import http.client
import resource
import socket
import threading
import time

import grpc
import pytest

from collector.config import Config
from collector.ingest.otlp_grpc import METHOD
from collector.ingest.otlp_http import CONTENT_TYPE
from collector.runtime.filesystem import resident_bytes
from collector.runtime.http import CONNECTIONS_MAX
from collector.telemetry.table import (
    ACCEPTED,
    DECODED_SPANS,
    REQUESTS,
    SPANS,
    WORKER_FAILED_SPANS,
)
from tests.support import otlp_bytes as otlp
from tests.support.clocks import eventually
from tests.support.sidecars import call_export, running_sidecar
from tests.support.silent_calls import own_channel, silent_calls
from tests.support.step_exports import make_export

CODE = grpc.StatusCode
MIB = 1 << 20
ONE = make_export().SerializeToString()
FULL = 8 * MIB - 100


@pytest.fixture
def sidecar(tmp_path, monkeypatch):
    monkeypatch.setattr("collector.ingest.intake.RECEIVE_TIMEOUT_S", 2.0)
    monkeypatch.setattr(Config, "connections_max", 64)
    with running_sidecar(tmp_path) as made:
        yield made


def code_of(port, payload, **kwargs):
    try:
        call_export(port, payload, **kwargs)
    except grpc.RpcError as error:
        return error.code()
    return CODE.OK


def post(port):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", "/v1/traces", ONE, {"Content-Type": CONTENT_TYPE})
        return connection.getresponse().status


def assert_well(sidecar, step=[1_000]):  # noqa: B006 -- every call sends new spans
    step[0] += 10
    new = make_export(first_step=step[0]).SerializeToString()
    eventually(lambda: code_of(sidecar.grpc_port, new) is CODE.OK)  # a bomb may fill the queue while it is looked at
    assert post(sidecar.otlp_http_port) == 200
    eventually(lambda: sidecar.queue.in_flight_bytes == 0)
    assert sidecar.health.alive()
    value = sidecar.metrics.value
    assert value(WORKER_FAILED_SPANS) == 0
    assert value(SPANS, "grpc", "failed") == value(SPANS, "http", "failed") == 0
    accepted = value(SPANS, "grpc", ACCEPTED) + value(SPANS, "http", ACCEPTED)
    eventually(lambda: decoded(sidecar) == accepted)


def decoded(sidecar):
    """Spans that were looked at, whatever became of them."""
    ((_, outcomes),) = DECODED_SPANS.labels
    return sum(sidecar.metrics.value(DECODED_SPANS, outcome) for outcome in outcomes)


def export_over(channel, step):
    new = make_export(first_step=step).SerializeToString()
    channel.unary_unary(METHOD)(new, timeout=10)  # as long as an exporter waits


def test_120_calls_without_a_message_on_one_connection_keep_nobody_waiting(sidecar):
    with contextlib.ExitStack() as stack:
        honest, hostile = (stack.enter_context(own_channel(sidecar.grpc_port)) for _ in range(2))
        export_over(honest, 1)
        silent = stack.enter_context(silent_calls(hostile, 120))
        for number in range(1, 6):
            assert not all(call.done() for call in silent)
            start_s = time.monotonic()
            export_over(honest, 20 * number)
            with own_channel(sidecar.grpc_port) as fresh:
                export_over(fresh, 20 * number + 10)
            assert time.monotonic() - start_s < 2.0
        ended = ("incomplete", "queue_full")  # its time was over, or its turn did not come
        eventually(lambda: sum(sidecar.metrics.value(REQUESTS, "grpc", outcome) for outcome in ended) >= 8)
    assert_well(sidecar)


def test_silent_calls_on_a_hundred_connections_keep_no_newcomer_waiting(tmp_path):
    with running_sidecar(tmp_path) as sidecar, contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(silent_calls(stack.enter_context(own_channel(sidecar.grpc_port)), 8))
        for number in range(1, 4):
            start_s = time.monotonic()
            with own_channel(sidecar.grpc_port) as fresh:
                export_over(fresh, 20 * number)
            assert time.monotonic() - start_s < 2.0
        assert_well(sidecar)


def test_messages_that_are_refused_are_let_go_of_at_once(sidecar):
    refused = b"\xff" * FULL
    gc.collect()
    gc.disable()  # what is part of a cycle would stay
    try:
        before_bytes = resident_bytes()
        for _ in range(20):
            assert code_of(sidecar.grpc_port, refused) is CODE.INVALID_ARGUMENT
        assert resident_bytes() - before_bytes < 80 * MIB
    finally:
        gc.enable()


def test_a_probe_is_answered_while_another_address_holds_all_places_of_the_pages(sidecar):
    with contextlib.ExitStack() as stack:
        probe = stack.enter_context(
            contextlib.closing(
                http.client.HTTPConnection("127.0.0.1", sidecar.http_port, source_address=("127.0.0.2", 0))
            )
        )
        probe.connect()
        for _ in range(CONNECTIONS_MAX + 8):
            stack.enter_context(socket.create_connection(("127.0.0.1", sidecar.http_port)))
        probe.request("GET", "/healthz")
        assert probe.getresponse().status == 200


BOMBS = {
    "resources": b"\x0a\x00" * (FULL // 2),
    "scopes": otlp.field(1, b"\x12\x00" * (FULL // 2)),
    "spans": otlp.field(1, otlp.field(2, b"\x12\x00" * (FULL // 2))),
    "events": otlp.in_step_span(b"\x5a\x00" * (FULL // 2)),
    "events of a byte": otlp.in_step_span(b"\x5a\x01\x00" * (FULL // 3)),
    "events below the size where they are counted": otlp.in_step_span(b"\x5a\x00" * (MIB // 2 - 100)),
    "links": otlp.in_step_span(b"\x6a\x00" * (FULL // 2)),
    "attributes of a span": otlp.in_step_span(b"\x4a\x00" * (FULL // 2)),
    "attributes of one event": otlp.in_step_span(otlp.field(11, b"\x1a\x00" * (FULL // 2))),
    "attributes of a resource": otlp.field(1, otlp.field(1, b"\x0a\x00" * (FULL // 2))),
    "values in a value": otlp.field(
        1, otlp.field(1, otlp.field(1, otlp.field(2, otlp.field(5, b"\x0a\x00" * (FULL // 2)))))
    ),
    "numbers at the top": b"\x10\x00" * (FULL // 2),
}


@pytest.mark.parametrize("name", BOMBS)
def test_millions_of_empty_messages_do_not_become_a_gigabyte(sidecar, name):
    before_bytes = resident_bytes()
    peak_bytes = [0]
    done = threading.Event()

    def watch():
        while not done.wait(0.02):
            peak_bytes[0] = max(peak_bytes[0], resident_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        assert code_of(sidecar.grpc_port, BOMBS[name], timeout_s=30) in (CODE.OK, CODE.INVALID_ARGUMENT)
        assert_well(sidecar)
    finally:
        done.set()
    assert peak_bytes[0] - before_bytes < 250 * MIB


def test_messages_nested_deeper_than_any_parser_goes_are_refused_or_skipped(sidecar):
    value = b"\x10\x01"
    for _ in range(5000):
        value = otlp.field(5, otlp.field(1, value))
    deep = otlp.summary(5) + otlp.field(3, otlp.field(1, b"deep") + otlp.field(2, value))
    assert code_of(sidecar.grpc_port, otlp.steps_export([deep])) is CODE.OK
    nested = b""
    for _ in range(5000):
        nested = otlp.field(1, nested)
    assert code_of(sidecar.grpc_port, nested) in (CODE.OK, CODE.INVALID_ARGUMENT)
    assert_well(sidecar)


@pytest.mark.parametrize("place", ["scope", "span", "event", "key", "value", "resource"])
def test_text_that_is_not_utf8_is_skipped_or_refused(sidecar, place):
    text = {
        name: b"\xff\xfe" if name == place else b"vllm.scheduler.step"
        for name in ("scope", "span", "event", "key", "value")
    }
    attribute = otlp.field(1, text["key"]) + otlp.field(2, otlp.field(1, text["value"]))
    span = otlp.step_span([otlp.summary(1), otlp.field(2, text["event"])], tail=otlp.field(9, attribute))
    scope = otlp.field(1, otlp.field(1, text["scope"])) + otlp.field(2, span + otlp.field(5, text["span"]))
    resource_name = otlp.field(1, otlp.field(1, otlp.field(1, b"\xff" if place == "resource" else b"x")))
    assert code_of(sidecar.grpc_port, otlp.field(1, resource_name + otlp.field(2, scope))) in (
        CODE.OK,
        CODE.INVALID_ARGUMENT,
    )
    assert_well(sidecar)


@pytest.mark.parametrize(
    "words", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n", b"GET / HTTP/1.1\r\n\r\n", bytes(300), b"\x16\x03\x01"]
)
def test_bytes_that_are_no_protocol_and_clients_that_stop_in_the_middle(sidecar, words):
    with contextlib.ExitStack() as stack:
        for port in (sidecar.grpc_port, sidecar.otlp_http_port) * 20:
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
            with contextlib.suppress(OSError):
                client.sendall(words)
                client.shutdown(socket.SHUT_WR)
        assert_well(sidecar)


def connected(port, count):
    """So many attempts to connect, none of which waits for its answer."""
    for _ in range(count):
        client = socket.socket()
        client.setblocking(False)
        client.connect_ex(("127.0.0.1", port))
        yield client


@pytest.mark.parametrize("receiver", ["grpc_port", "otlp_http_port"])
def test_a_thousand_connections_find_a_bounded_number_of_places(sidecar, receiver):
    """Whoever calls finds one, as soon as those who say nothing have given way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    before_bytes = resident_bytes()
    try:
        with contextlib.ExitStack() as stack:
            for client in connected(getattr(sidecar, receiver), min(1000, hard // 4)):
                stack.enter_context(client)
            eventually(lambda: is_served(sidecar, receiver))
            assert resident_bytes() - before_bytes < 100 * MIB
        eventually(lambda: is_served(sidecar, receiver))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert_well(sidecar)


def is_served(sidecar, receiver):
    if receiver == "grpc_port":  # a call waits with gRPC's own patience, hence not one call
        return code_of(sidecar.grpc_port, ONE, timeout_s=5, wait=False) is CODE.OK
    with contextlib.suppress(OSError, http.client.HTTPException):
        return post(sidecar.otlp_http_port) == 200
    return False


def test_connections_without_a_call_are_closed_when_they_have_been_idle_for_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr("collector.ingest.otlp_grpc.IDLE_S", 0.5)
    monkeypatch.setattr(Config, "connections_max", 8)
    with running_sidecar(tmp_path) as sidecar, contextlib.ExitStack() as stack:
        for _ in range(20):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", sidecar.grpc_port), 60))
            with contextlib.suppress(OSError):
                client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
                client.sendall(bytes(3) + b"\x04\x01" + bytes(4))  # settings, and that the server's are taken
        eventually(lambda: code_of(sidecar.grpc_port, ONE, timeout_s=5, wait=False) is CODE.OK)


def test_the_densest_exports_of_the_default_size_stay_below_the_memory_limit_of_a_sidecar(sidecar):
    assert code_of(sidecar.grpc_port, b"\x12\x00" * (4 * MIB + 1)) is CODE.RESOURCE_EXHAUSTED, "more than 8 MiB"
    attribute = otlp.field(3, otlp.field(1, b"step.some.key") + otlp.field(2, b"\x18\x07"))
    event = otlp.field(11, otlp.field(2, b"step.BATCH_SUMMARY") + attribute * 100)
    dense = otlp.in_step_span(event * ((8 * MIB - 1000) // len(event)))
    before_bytes = resident_bytes()
    peak_bytes = []

    def send():
        code_of(sidecar.grpc_port, dense, timeout_s=60)
        peak_bytes.append(resident_bytes())

    senders = [threading.Thread(target=send) for _ in range(16)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert max(peak_bytes) - before_bytes < 340 * MIB
    assert_well(sidecar)
