"""Hostile and broken clients against the real sidecar: it stays up, bounded, and open to everybody else."""

import contextlib
import gc
import http.client
import itertools
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import pytest

from collector.ingest.otlp_grpc import METHOD
from collector.runtime.filesystem import resident_bytes
from collector.telemetry.reasons import Outcome, Skip
from collector.telemetry.table import ACCEPTED, DECODED_SPANS, REQUESTS, SPANS, WORKER_FAILED_SPANS
from tests.support import otlp_bytes as otlp
from tests.support.clocks import eventually
from tests.support.pipelines import value_of
from tests.support.sidecars import ask, code_of, post, running_sidecar
from tests.support.silent_calls import own_channel, silent_calls
from tests.support.step_exports import make_export

CODE = grpc.StatusCode
MIB = 1 << 20
ONE = make_export().SerializeToString()
FULL = 8 * MIB - 100
STEPS = itertools.count(1_000, 10)
"""Every call sends new spans."""


@pytest.fixture
def sidecar(tmp_path, monkeypatch):
    monkeypatch.setattr("collector.ingest.budget.RECEIVE_TIMEOUT_S", 2.0)
    monkeypatch.setattr("collector.ingest.otlp_grpc.CONNECTIONS_PER_ENGINE", 1)
    with running_sidecar(tmp_path) as made:
        yield made


def assert_well(sidecar):
    """Both receivers serve, nothing failed, and each span that was taken is looked at, whatever becomes of it."""
    new = make_export(first_step=next(STEPS)).SerializeToString()
    eventually(lambda: code_of(sidecar.grpc_port, new) is CODE.OK)  # a bomb may fill the queue while it is looked at
    assert post(sidecar.otlp_http_port, ONE)[0] == 200
    eventually(lambda: sidecar.queue.in_flight_bytes == 0)
    assert not sidecar.health.late()
    value = partial(value_of, sidecar.metrics)
    assert value(WORKER_FAILED_SPANS) == 0
    assert value(SPANS, "grpc", "failed") == value(SPANS, "http", "failed") == 0
    accepted = value(SPANS, "grpc", ACCEPTED) + value(SPANS, "http", ACCEPTED)
    ((_, outcomes),) = DECODED_SPANS.labels
    eventually(lambda: sum(value(DECODED_SPANS, outcome) for outcome in outcomes) == accepted)


@contextlib.contextmanager
def growing_by_less_than(limit_bytes):
    """The memory of this process, looked at again and again in the block."""
    before_bytes, seen_bytes, done = resident_bytes(), [], threading.Event()

    def watch():
        while not done.wait(0.02):
            seen_bytes.append(resident_bytes())

    with ThreadPoolExecutor(1) as watcher:
        watched = watcher.submit(watch)
        try:
            yield
        finally:
            done.set()
        watched.result()
    assert max([*seen_bytes, resident_bytes()]) - before_bytes < limit_bytes


def assert_served_at_once(channel):
    start_s = time.monotonic()
    new = make_export(first_step=next(STEPS)).SerializeToString()
    channel.unary_unary(METHOD)(new, timeout=10)  # as long as an exporter waits
    assert time.monotonic() - start_s < 2.0


@pytest.mark.parametrize(("connections", "calls"), [(1, 120), (100, 8)])
def test_calls_without_a_message_keep_nobody_waiting(tmp_path, connections, calls):
    with running_sidecar(tmp_path) as sidecar, contextlib.ExitStack() as stack:
        honest, *hostile = (stack.enter_context(own_channel(sidecar.grpc_port)) for _ in range(1 + connections))
        assert_served_at_once(honest)
        silent = [call for each in hostile for call in stack.enter_context(silent_calls(each, calls))]
        for _ in range(4):
            assert not all(call.done() for call in silent)
            assert_served_at_once(honest)
            with own_channel(sidecar.grpc_port) as fresh:
                assert_served_at_once(fresh)
        ended = ("incomplete", "queue_full")  # its time was over, or its turn did not come
        eventually(lambda: sum(value_of(sidecar.metrics, REQUESTS, "grpc", outcome) for outcome in ended) >= 8)
        assert_well(sidecar)


def test_messages_that_are_refused_are_let_go_of_at_once(sidecar):
    gc.collect()
    gc.disable()  # what is part of a cycle would stay
    try:
        with growing_by_less_than(80 * MIB):
            for _ in range(20):
                assert code_of(sidecar.grpc_port, b"\xff" * FULL) is CODE.INVALID_ARGUMENT
    finally:
        gc.enable()


HELD = b"POST /v1/traces HTTP/1.1\r\nContent-Type: application/x-protobuf\r\nContent-Length: 100\r\n\r\n"


@pytest.mark.parametrize("port", ["http_port", "otlp_http_port"])
@pytest.mark.parametrize("words", [b"", HELD, b"GET / HTTP/1.1\r\n\r\n" * 300], ids=["nothing", "a head", "no reading"])
def test_whatever_connections_of_the_same_address_hold_back_a_newcomer_is_served_within_five_seconds(
    sidecar, port, words
):
    with contextlib.ExitStack() as stack:
        for _ in range(70):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", getattr(sidecar, port))))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with contextlib.suppress(OSError):
                client.sendall(words)
        start_s = time.monotonic()
        answered = post(getattr(sidecar, port), ONE) if "otlp" in port else ask(sidecar.http_port, "/healthz")
        assert answered[0] == 200
        assert time.monotonic() - start_s < 5.0


def in_fields(body, *numbers):
    """The body in a field in a field…, the last one outermost."""
    for number in numbers:
        body = otlp.field(number, body)
    return body


def without_utf8(place):
    """An export with bytes that are no text in one place."""
    text = {each: b"\xff\xfe" if each == place else b"vllm.scheduler.step" for each in ("scope", "span", *PLACES)}
    attribute = otlp.field(1, text["key"]) + in_fields(text["value"], 1, 2)
    span = otlp.step_span([otlp.summary(1), otlp.field(2, text["event"])], tail=otlp.field(9, attribute))
    scope = in_fields(text["scope"], 1, 1) + otlp.field(2, span + otlp.field(5, text["span"]))
    return otlp.field(1, in_fields(text["resource"], 1, 1, 1) + otlp.field(2, scope))


PLACES = ("event", "key", "value", "resource")
DEEP = in_fields(b"\x10\x01", *(1, 5) * 5000)
EMPTY = FULL // 2
HOSTILE = {
    ("refused", Outcome.TOO_LARGE): {
        "resources": b"\x0a\x00" * EMPTY,
        "scopes": otlp.field(1, b"\x12\x00" * EMPTY),
        "spans": in_fields(b"\x12\x00" * EMPTY, 2, 1),
        "events": otlp.in_step_span(b"\x5a\x00" * EMPTY),
        "events of a byte": otlp.in_step_span(b"\x5a\x01\x00" * (FULL // 3)),
        "links": otlp.in_step_span(b"\x6a\x00" * EMPTY),
        "attributes of a span": otlp.in_step_span(b"\x4a\x00" * EMPTY),
        "attributes of a resource": in_fields(b"\x0a\x00" * EMPTY, 1, 1),
        "attributes of one event": otlp.in_step_span(otlp.field(11, b"\x1a\x00" * EMPTY)),
        "numbers at the top": b"\x10\x00" * EMPTY,
    },
    ("taken", Outcome.ACCEPTED): {
        "values in a value": in_fields(b"\x0a\x00" * EMPTY, 5, 2, 1, 1, 1),
        "messages nested deeper than any parser goes": in_fields(b"", *(1,) * 5000),
        "values nested deeper than any parser goes": otlp.steps_export(
            [otlp.summary(5) + otlp.field(3, otlp.field(1, b"deep") + otlp.field(2, DEEP))]
        ),
    },
    ("skipped", Skip.OUT_OF_RANGE): {
        "events below the size where they are counted": otlp.in_step_span(b"\x5a\x00" * (MIB // 2 - 100)),
    },
    ("skipped", Skip.UNDECODABLE): {
        **{f"no text as {place}": without_utf8(place) for place in PLACES},
    },
    ("refused", Outcome.UNDECODABLE): {
        "attributes behind a group": otlp.in_step_span(otlp.field(11, b"\xa3\x06\xa4\x06" + b"\x1a\x00" * (EMPTY - 9))),
        **{f"no text as {place}": without_utf8(place) for place in ("scope", "span")},
    },
}
"""Exports by what becomes of them: refused, taken, or taken while their one span is skipped, and for what reason."""


@pytest.mark.parametrize(("became", "name"), [(became, name) for became, named in HOSTILE.items() for name in named])
def test_whatever_an_export_is_made_of_it_has_its_reason_and_does_not_become_a_gigabyte(sidecar, became, name):
    (fate, reason), value = became, partial(value_of, sidecar.metrics)
    with growing_by_less_than(250 * MIB):
        code = code_of(sidecar.grpc_port, HOSTILE[became][name], timeout_s=30)
        assert code is (CODE.INVALID_ARGUMENT if fate == "refused" else CODE.OK)
        assert_well(sidecar)
    assert (value(DECODED_SPANS, reason) if fate == "skipped" else value(REQUESTS, "grpc", reason)) >= 1


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


def is_served(sidecar, receiver):
    if receiver == "grpc_port":  # a call waits with gRPC's own patience, hence not one call
        return code_of(sidecar.grpc_port, ONE, timeout_s=5, wait=False) is CODE.OK
    with contextlib.suppress(OSError, http.client.HTTPException):
        return post(sidecar.otlp_http_port, ONE)[0] == 200
    return False


@pytest.mark.parametrize("receiver", ["grpc_port", "otlp_http_port"])
def test_a_thousand_connections_find_a_bounded_number_of_places(sidecar, receiver):
    """Whoever calls finds one, as soon as those who say nothing have given way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with growing_by_less_than(100 * MIB), contextlib.ExitStack() as stack:
            for _ in range(min(1000, hard // 4)):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", getattr(sidecar, receiver)))  # without waiting for an answer
            eventually(lambda: is_served(sidecar, receiver))
        eventually(lambda: is_served(sidecar, receiver))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert_well(sidecar)


def test_connections_without_a_call_are_closed_when_they_have_been_idle_for_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr("collector.ingest.otlp_grpc.IDLE_S", 0.5)
    with running_sidecar(tmp_path, ENGINES_MAX="1") as sidecar, contextlib.ExitStack() as stack:
        for _ in range(20):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", sidecar.grpc_port), 60))
            with contextlib.suppress(OSError):
                client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
                client.sendall(bytes(3) + b"\x04\x01" + bytes(4))  # settings, and that the server's are taken
        eventually(lambda: is_served(sidecar, "grpc_port"))


def test_the_densest_exports_of_the_default_size_stay_below_the_memory_limit_of_a_sidecar(sidecar):
    assert code_of(sidecar.grpc_port, b"\x12\x00" * (4 * MIB + 1)) is CODE.RESOURCE_EXHAUSTED, "more than 8 MiB"
    attribute = otlp.field(3, otlp.field(1, b"step.some.key") + otlp.field(2, b"\x18\x07"))
    event = otlp.field(11, otlp.field(2, b"step.BATCH_SUMMARY") + attribute * 100)
    dense = otlp.in_step_span(event * ((8 * MIB - 1000) // len(event)))
    with growing_by_less_than(340 * MIB), ThreadPoolExecutor(16) as senders:
        for _ in range(16):
            senders.submit(code_of, sidecar.grpc_port, dense, timeout_s=60)
    assert_well(sidecar)
