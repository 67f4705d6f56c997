"""What a client sees: the status table of OTLP/HTTP, against a real server on a real port."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import socket
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from google.rpc import status_pb2
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from collector.config import Config
from collector.ingest import intake as intake_module
from collector.ingest import otlp_http
from collector.ingest.intake import FIELDS_MAX, ReceiveBudget
from collector.ingest.otlp_http import CONTENT_TYPE, make_http_receiver
from collector.runtime.filesystem import StartError
from collector.telemetry.table import ACCEPTED, REQUESTS, SPANS
from tests.support.clocks import eventually
from tests.support.receptions import MIB, Reception
from tests.support.step_exports import make_export, otlp_json

ONE = make_export().SerializeToString()
PROTOBUF = {"Content-Type": CONTENT_TYPE}
ONE_JSON = otlp_json(make_export())
JSON = {"Content-Type": "application/json"}
GZIP = PROTOBUF | {"Content-Encoding": "gzip"}


def make_receiver(config, intake):
    return make_http_receiver(config, intake, ReceiveBudget(config.message_max_mib * MIB), grace_s=0)


class Receiver(Reception):
    """On a port of its own."""

    def __init__(self, *, offer=None, **config):
        super().__init__(offer)
        self.server = make_receiver(Config(listen_http="127.0.0.1:0", **config), self.intake)
        self.server.start()
        self.port = self.server.port

    def post(self, body, headers=PROTOBUF, path="/v1/traces", method="POST"):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
        with contextlib.closing(connection):
            connection.request(method, path, body, dict(headers))
            reply = connection.getresponse()
            return reply.status, reply.read(), reply

    def requests(self, outcome):
        return self.metrics.value(REQUESTS, "http", outcome)


@contextlib.contextmanager
def running(**kwargs):
    receiver = Receiver(**kwargs)
    try:
        yield receiver
    finally:
        receiver.server.stop()


@pytest.fixture
def receiver():
    with running() as made:
        yield made


@pytest.mark.parametrize(
    ("body", "headers", "path", "method", "status", "outcome"),
    [
        pytest.param(ONE, PROTOBUF, "/v1/traces", "POST", 200, "accepted", id="protobuf"),
        pytest.param(gzip.compress(ONE), GZIP, "/v1/traces", "POST", 200, "accepted", id="gzip"),
        pytest.param(gzip.compress(ONE[:50]) + gzip.compress(ONE[50:]), GZIP, "/v1/traces", "POST", 200, "accepted",
                     id="gzip in two members"),
        pytest.param(ONE, {"Content-Type": f"{CONTENT_TYPE}; charset=utf-8"}, "/v1/traces?x=1", "POST", 200, "accepted",
                     id="a parameter and a query"),
        pytest.param(b"", PROTOBUF, "/v1/traces", "POST", 200, "accepted", id="empty request"),
        pytest.param(ONE[:-1], PROTOBUF, "/v1/traces", "POST", 400, "undecodable", id="cut short"),
        pytest.param(ONE_JSON, JSON, "/v1/traces", "POST", 200, "accepted", id="JSON"),
        pytest.param(gzip.compress(ONE_JSON), JSON | {"Content-Encoding": "gzip"}, "/v1/traces", "POST", 200,
                     "accepted", id="JSON, gzip"),
        pytest.param(b"{}", JSON, "/v1/traces", "POST", 200, "accepted", id="empty JSON"),
        pytest.param(ONE_JSON[:-5], JSON, "/v1/traces", "POST", 400, "undecodable", id="JSON cut short"),
        pytest.param(ONE, JSON, "/v1/traces", "POST", 400, "undecodable", id="protobuf that says it is JSON"),
        pytest.param(b"{}" * (FIELDS_MAX + 1), JSON, "/v1/traces", "POST", 413, "too_large", id="many objects"),
        pytest.param(ONE, {"Content-Type": "text/plain"}, "/v1/traces", "POST", 415, "undecodable", id="text"),
        pytest.param(ONE, {}, "/v1/traces", "POST", 415, "undecodable", id="no content type"),
        pytest.param(ONE, PROTOBUF | {"Content-Encoding": "zstd"}, "/v1/traces", "POST", 415, "undecodable", id="zstd"),
        pytest.param(ONE, GZIP, "/v1/traces", "POST", 400, "undecodable", id="not gzip"),
        pytest.param(gzip.compress(ONE)[:-9], GZIP, "/v1/traces", "POST", 400, "undecodable", id="gzip cut short"),
        pytest.param(ONE, PROTOBUF, "/v1/metrics", "POST", 404, "undecodable", id="metrics"),
        pytest.param(ONE, PROTOBUF, "/v1/logs", "POST", 404, "undecodable", id="logs"),
        pytest.param(b"", PROTOBUF, "/v1/traces", "GET", 405, "undecodable", id="GET"),
        pytest.param(ONE, PROTOBUF, "/v1/traces", "PUT", 405, "undecodable", id="PUT"),
    ],
)  # fmt: skip
def test_every_outcome_has_its_status_and_a_body_as_the_client_speaks(
    receiver, body, headers, path, method, status, outcome
):
    got, reply, response = receiver.post(body, headers, path, method)
    is_json = headers.get("Content-Type") == JSON["Content-Type"]
    assert (got, response.getheader("Content-Type")) == (status, JSON["Content-Type"] if is_json else CONTENT_TYPE)
    if status == 200:
        assert (
            reply == b"{}" if is_json else not ExportTraceServiceResponse.FromString(reply).HasField("partial_success")
        )
    else:
        assert json.loads(reply)["message"] if is_json else status_pb2.Status.FromString(reply).message
    assert receiver.requests(outcome) == 1


def test_json_and_protobuf_are_one_export_to_whom_takes_it(receiver):
    for body, headers in ((ONE, PROTOBUF), (ONE_JSON, JSON)):
        assert receiver.post(body, headers)[0] == 200
    first, second = receiver.queue.take(MIB, 0.0).items
    assert ExportTraceServiceRequest.FromString(second.payload) == ExportTraceServiceRequest.FromString(first.payload)
    assert first.spans == second.spans


def test_a_full_queue_is_503_with_a_hint_and_the_accounting_closes(receiver):
    receiver.fill()
    status, body, response = receiver.post(ONE_JSON, JSON)
    assert json.loads(body) == {"code": 8, "message": "queue full"}
    assert receiver.post(b"{", JSON)[0] == 400, "what is no export is not asked to come again"
    status, body, response = receiver.post(ONE)
    assert status == 503
    assert 1 <= int(response.getheader("Retry-After")) <= 2
    assert status_pb2.Status.FromString(body).code == 8
    count = receiver.metrics.value
    assert (count(SPANS, "http", "queue_full"), count(SPANS, "http", ACCEPTED)) == (2, 0)


def test_our_own_fault_is_500_and_tells_nothing_of_its_inside():
    async def offer(*_):
        raise RuntimeError("secret detail")

    with running(offer=offer) as receiver:
        status, body, _ = receiver.post(ONE)
        assert status == 500
        assert b"secret" not in body


@pytest.mark.parametrize(
    ("rest", "status", "outcome"),
    [
        (b"Content-Length: 99999999999\r\n\r\n", b"413", "too_large"),
        (b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", b"411", "undecodable"),
    ],
)
def test_a_body_beyond_the_limit_or_without_a_length_is_refused_before_it_is_read(receiver, rest, status, outcome):
    with socket.create_connection(("127.0.0.1", receiver.port), 60) as client:
        client.sendall(b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\n" + rest)
        assert client.recv(100).startswith(b"HTTP/1.1 " + status)
    assert receiver.requests(outcome) == 1
    assert receiver.post(ONE)[0] == 200


@pytest.mark.parametrize("members", [1, 3])
def test_a_gzip_bomb_is_413_and_never_unfolds(members):
    with running(message_max_mib=1) as receiver:
        bomb = gzip.compress(bytes(64 * MIB // members)) * members
        assert len(bomb) < MIB
        assert receiver.post(bomb, GZIP)[0] == 413
        assert receiver.post(ONE)[0] == 200


@pytest.mark.parametrize(
    ("members", "status"), [(64, 200), pytest.param(65, 400, id="65"), pytest.param(1_000_000, 400, id="a million")]
)
def test_a_body_of_many_gzip_members_is_refused_before_its_65th_and_others_are_served(members, status, monkeypatch):
    made = []
    make = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", lambda **kwargs: made.append(1) or make(**kwargs))
    empty = gzip.compress(b"")
    with running(message_max_mib=32) as receiver, ThreadPoolExecutor(1) as other:
        hostile = other.submit(receiver.post, empty * members, GZIP)
        assert [receiver.post(gzip.compress(ONE), GZIP)[0] for _ in range(3)] == [200] * 3
        assert hostile.result(100)[0] == status
        assert len(made) == 3 + min(members, 64)
        assert receiver.requests("undecodable") == (status == 400)


def gzip_request():
    body = gzip.compress(ONE)
    return HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n") % len(body) + body


class SlowInflating:
    """Holds back what inflates until the test says so."""

    def __init__(self, monkeypatch):
        self.begun, self.goes_on = threading.Event(), threading.Event()
        inflate = otlp_http.inflate

        def slowly(*arguments):
            self.begun.set()
            assert self.goes_on.wait(100)
            return inflate(*arguments)

        monkeypatch.setattr(otlp_http, "inflate", slowly)


def test_a_body_that_takes_too_long_to_inflate_is_503_and_gives_its_share_back(monkeypatch):
    with running() as receiver:
        with monkeypatch.context() as patched:
            patched.setattr(otlp_http, "INFLATE_S", -1.0)
            status, _, reply = receiver.post(gzip.compress(ONE), GZIP)
            assert (status, reply.headers["Retry-After"]) == (503, "1")
        assert receiver.requests("queue_full") == 1
        assert [receiver.post(gzip.compress(ONE), GZIP)[0] for _ in range(20)] == [200] * 20


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_client_that_is_slow_to_be_inflated_is_answered_unless_it_resets_its_connection(monkeypatch, is_reset):
    inflating = SlowInflating(monkeypatch)
    with running() as receiver:
        with socket.create_connection(("127.0.0.1", receiver.port), 60) as client:
            client.sendall(gzip_request())
            assert inflating.begun.wait(100)
            if is_reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                inflating.goes_on.set()
                assert client.recv(100).startswith(b"HTTP/1.1 200 ")
        if is_reset:
            assert receiver.post(ONE)[0] == 200  # the loop has seen the reset, too
            inflating.goes_on.set()
            eventually(lambda: receiver.requests("incomplete") == 1)
        assert receiver.requests("accepted") == 1


HEAD = b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\nContent-Length: %d\r\n\r\n"


def test_a_body_that_trickles_ends_with_408_however_often_a_byte_comes(monkeypatch):
    monkeypatch.setattr(intake_module, "RECEIVE_TIMEOUT_S", 0.5)
    with running() as receiver, socket.create_connection(("127.0.0.1", receiver.port), 60) as client:
        client.sendall(HEAD % 1000)
        start_s = time.monotonic()
        answer = b""
        client.settimeout(0.05)
        while not answer and time.monotonic() - start_s < 100:
            with contextlib.suppress(TimeoutError, BrokenPipeError):
                client.sendall(b"\x0a")
                answer = client.recv(100)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert receiver.requests("incomplete") == 1


def test_a_client_that_goes_away_in_the_middle_of_a_body_costs_nothing(receiver):
    with socket.create_connection(("127.0.0.1", receiver.port), 60) as client:
        client.sendall(HEAD % 1000 + b"abc")
    eventually(lambda: receiver.requests("incomplete") == 1)
    assert receiver.post(ONE)[0] == 200


def test_connections_that_dawdle_give_way_to_one_that_sends():
    with running() as receiver, contextlib.ExitStack() as stack:
        for sent in (b"", b"POST /v1", HEAD % 1000, HEAD % 1000 + b"abc") * 25:
            client = stack.enter_context(socket.create_connection(("127.0.0.1", receiver.port), 10))
            client.sendall(sent)
        for _ in range(5):
            assert receiver.post(ONE)[0] == 200


def test_senders_of_large_bodies_that_never_end_keep_nobody_out():
    size = MIB - 1
    with running(message_max_mib=1) as receiver, contextlib.ExitStack() as stack:
        for _ in range(12):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", receiver.port), 60))
            client.sendall(HEAD % size)
            sender = threading.Thread(target=_send_all_but_one, args=(client, size))
            sender.start()
            stack.callback(sender.join)
        for _ in range(3):  # who finds no room in two seconds hears 503, and an exporter comes again
            eventually(lambda: receiver.post(ONE)[0] == 200)


def _send_all_but_one(client, size):
    with contextlib.suppress(OSError):
        client.sendall(bytes(size - 1))


def test_a_port_in_use_is_one_clear_sentence(receiver):
    second = make_receiver(Config(listen_http=f"127.0.0.1:{receiver.port}"), receiver.intake)
    with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{receiver.port} for OTLP/HTTP"):
        second.start()
