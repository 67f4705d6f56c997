"""What a client sees over gRPC and over HTTP: the status table of OTLP, against real receivers on real ports."""

import contextlib
import gzip
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import pytest
from google.protobuf import json_format
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans

from collector.config import Config
from collector.decode import Export
from collector.ingest import budget, otlp_http
from collector.ingest.consumer import ExportConsumer
from collector.ingest.otlp_grpc import SERVICE, OtlpGrpcReceiver
from collector.ingest.otlp_http import CONTENT_TYPE, make_http_receiver
from collector.ingest.queue import ExportQueue
from collector.runtime import running
from collector.runtime.tasks import Clock
from collector.telemetry import Metrics
from collector.telemetry.table import ACCEPTED, REQUESTS, SPANS
from tests.support import otlp_bytes as otlp
from tests.support.clocks import eventually
from tests.support.pipelines import value_of
from tests.support.sidecars import call_export, post
from tests.support.step_exports import make_export, otlp_json

CODE = grpc.StatusCode
MIB = 1 << 20
ONE = make_export().SerializeToString()
ONE_JSON = otlp_json(make_export())
PROTOBUF, JSON = ({"Content-Type": kind} for kind in (CONTENT_TYPE, "application/json"))
GZIP = {"Content-Encoding": "gzip"}
ANY_PORT = "127.0.0.1:0"


class Queue(ExportQueue):
    """It counts who has asked for room, also while they wait for it."""

    asked = 0

    async def put(self, item):
        self.asked += 1
        return await super().put(item)


class Receivers:
    """Both of them, before a queue without a worker: a test decides when there is room."""

    def __init__(self, wait_s, message_max_mib):
        self.metrics = Metrics()
        self.queue = Queue(Clock(), capacity_bytes=MIB, wait_s=wait_s)
        self.consumer = ExportConsumer(self.queue, self.metrics, message_bytes_max=message_max_mib * MIB)
        config = Config(listen=ANY_PORT, listen_http=ANY_PORT, message_max_mib=message_max_mib)
        self.grpc = OtlpGrpcReceiver(config, self.consumer, stop_timeout_s=0.5)
        self.http = make_http_receiver(config, self.consumer, stop_timeout_s=0)

    async def start(self):
        await self.grpc.start()
        await self.http.start()

    async def stop(self):
        await self.grpc.stop()
        await self.http.stop()

    def fill(self):
        """There is no room."""
        self.queue.put_nowait(Export(bytes(self.queue.capacity_bytes), "", 1))

    def drain(self):
        """There is room again."""
        self.queue.done(self.queue.take(MIB, 0.0))

    def call(self, payload, **how):
        """Status over gRPC, and what came with it."""
        try:
            return CODE.OK, call_export(self.grpc.port, payload, **how)
        except grpc.RpcError as error:
            return error.code(), error

    def post(self, *asked):
        """Status over HTTP, body and headers."""
        return post(self.http.port, *asked)

    def connect(self, sent=b""):
        """A connection to the receiver over HTTP on which this was sent."""
        client = socket.create_connection(("127.0.0.1", self.http.port), 60)
        client.sendall(sent)
        return client

    def requests(self, outcome, transport="http"):
        return value_of(self.metrics, REQUESTS, transport, outcome)


@contextlib.contextmanager
def receiving(wait_s=0.1, message_max_mib=8):
    made = Receivers(wait_s, message_max_mib)
    with running(made) as made.halt:
        yield made


@pytest.fixture
def receivers():
    with receiving() as made:
        yield made


EMPTY_ENVELOPES = ExportTraceServiceRequest(resource_spans=[{"scope_spans": [{}]}]).SerializeToString()
MANY_SPANS = ExportTraceServiceRequest(resource_spans=[{"scope_spans": [ScopeSpans(spans=[{}] * 70_000)]}])
OF_OTHERS = otlp.export(("fastapi", [otlp.step_span([b""])] * 300))


TAKEN = {
    "spans": (ONE, 1),
    "spans of others": (OF_OTHERS, 300),
    "empty request": (b"", 0),
    "empty envelopes": (EMPTY_ENVELOPES, 0),
    "a field of a newer protocol": (ONE + b"\xba\x3e\x03abc", 1),
}
REFUSED = {
    "no protobuf": (b"\xff" * 4, 400),
    "cut short": (ONE[:-1], 400),
    "another protocol": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "too many spans": (MANY_SPANS.SerializeToString(), 413),
    "too many messages in spans": (otlp.in_step_span(b"\x4a\x00" * 600_000), 413),
}
OUTCOMES = {200: "accepted", 413: "too_large"}
"""By the status over HTTP; any other is undecodable."""


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("name", TAKEN | REFUSED)
def test_every_export_has_the_status_that_the_specification_gives_it(receivers, name, packed):
    payload, spans, code, status = *TAKEN.get(name, (b"", 0)), CODE.OK, 200
    if name in REFUSED:
        (payload, status), code = REFUSED[name], CODE.INVALID_ARGUMENT
    got, reply = receivers.call(payload, compression=grpc.Compression.Gzip if packed else None)
    body, headers = (gzip.compress(payload), PROTOBUF | GZIP) if packed else (payload, PROTOBUF)
    assert (got, receivers.post(body, headers)[0]) == (code, status)
    if code is CODE.OK:
        assert not ExportTraceServiceResponse.FromString(reply).HasField("partial_success")
    taken = receivers.queue.take(MIB, 0.0).items if spans else ()
    assert [(export.spans, export.payload) for export in taken] == [(spans, payload)] * len(taken)
    for transport in ("grpc", "http"):
        assert receivers.requests(OUTCOMES.get(status, "undecodable"), transport) == 1
        assert value_of(receivers.metrics, SPANS, transport, ACCEPTED) == spans


ZSTD = PROTOBUF | {"Content-Encoding": "zstd"}
WITH_CHARSET = {"Content-Type": f"{CONTENT_TYPE}; charset=utf-8"}
ASKED = {
    "a parameter and a query": (200, ONE, WITH_CHARSET, ("/v1/traces?x=1", "POST")),
    "JSON, gzip": (200, gzip.compress(ONE_JSON), JSON | GZIP),
    "empty JSON": (200, b"{}", JSON),
    "JSON cut short": (400, ONE_JSON[:-5], JSON),
    "protobuf that says it is JSON": (400, ONE, JSON),
    "JSON of many values": (413, b'{"x":[' + b"{}," * 600_000 + b"{}]}", JSON),
    "JSON that is no gzip": (400, ONE_JSON, JSON | GZIP),
    "text": (415, ONE, {"Content-Type": "text/plain"}),
    "no content type": (415, ONE, {}),
    "zstd": (415, ONE, ZSTD),
    "not gzip": (400, ONE, PROTOBUF | GZIP),
    "gzip cut short": (400, gzip.compress(ONE)[:-9], PROTOBUF | GZIP),
    "gzip in two members": (400, gzip.compress(ONE[:50]) + gzip.compress(ONE[50:]), PROTOBUF | GZIP),
    "gzip of very many members": (400, gzip.compress(b"") * 400_000, PROTOBUF | GZIP),
    "metrics": (404, ONE, PROTOBUF, ("/v1/metrics", "POST")),
    "logs": (404, ONE, PROTOBUF, ("/v1/logs", "POST")),
    "GET": (405, b"", PROTOBUF, ("/v1/traces", "GET")),
    "PUT": (405, ONE, PROTOBUF, ("/v1/traces", "PUT")),
}


@pytest.mark.parametrize("name", ASKED)
def test_http_answers_as_its_client_speaks(receivers, name):
    status, body, headers, *to = ASKED[name]
    got, reply, answered = receivers.post(body, headers, *to)
    is_json = headers.get("Content-Type") == JSON["Content-Type"]
    assert (got, answered["Content-Type"]) == (status, JSON["Content-Type"] if is_json else CONTENT_TYPE)
    if status == 200:
        assert reply == (b"{}" if is_json else b"")
    else:
        said = json_format.Parse(reply, status_pb2.Status()) if is_json else status_pb2.Status.FromString(reply)
        unserved = status in {404, 405}
        assert said.message
        assert said.code == (CODE.UNIMPLEMENTED if unserved else CODE.INVALID_ARGUMENT).value[0]
    assert receivers.requests(OUTCOMES.get(status, "undecodable")) == 1


def test_json_and_protobuf_are_one_export_to_whom_takes_it(receivers):
    for body, headers in ((ONE, PROTOBUF), (ONE_JSON, JSON)):
        assert receivers.post(body, headers)[0] == 200
    first, second = receivers.queue.take(MIB, 0.0).items
    assert ExportTraceServiceRequest.FromString(second.payload) == ExportTraceServiceRequest.FromString(first.payload)
    assert first.spans == second.spans
    assert first.peer != second.peer, "who does not say who it is, is told by its connection"


def test_where_there_is_no_room_everybody_is_told_when_to_come_again_in_the_words_of_its_protocol(receivers):
    receivers.fill()
    code, error = receivers.call(ONE)
    trailers = dict(error.trailing_metadata())
    hint, standard = (error_details_pb2.RetryInfo() for _ in range(2))
    hint.ParseFromString(trailers["google.rpc.retryinfo-bin"])
    told = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert told.details[0].Unpack(standard)
    assert (code, told.code, hint) == (CODE.RESOURCE_EXHAUSTED, code.value[0], standard)
    assert 0.5 <= hint.retry_delay.ToTimedelta().total_seconds() <= 1.9
    status, body, headers = receivers.post(ONE)
    assert (status, status_pb2.Status.FromString(body).code) == (503, 8)
    assert 1 <= int(headers["Retry-After"]) <= 2
    assert json.loads(receivers.post(ONE_JSON, JSON)[1]) == {"code": 8, "message": "queue full"}
    assert receivers.post(b"{", JSON)[0] == 400, "what is no export is not asked to come again"
    count = partial(value_of, receivers.metrics)
    assert [count(SPANS, each, "queue_full") for each in ("grpc", "http")] == [1, 2]
    assert [count(SPANS, each, ACCEPTED) for each in ("grpc", "http")] == [0, 0]


def test_exports_that_wait_for_room_hold_up_nobody_enter_as_it_comes_and_hear_of_the_stop():
    with receiving(wait_s=100) as receivers, ThreadPoolExecutor(6) as callers:
        receivers.fill()
        first = callers.submit(receivers.call, ONE)
        eventually(lambda: receivers.queue.asked == 1)
        assert not first.done()
        receivers.drain()
        assert first.result(60)[0] is CODE.OK
        receivers.drain()
        receivers.fill()
        waiting = [callers.submit(receivers.call, ONE) for _ in range(6)]
        eventually(lambda: receivers.queue.asked == 7)
        assert receivers.call(b"")[0] is CODE.OK
        receivers.queue.close()
        assert {each.result(60)[0] for each in waiting} == {CODE.UNAVAILABLE}
        assert value_of(receivers.metrics, SPANS, "grpc", "shutting_down") == 6


def test_a_connection_that_gave_way_before_it_was_read_is_no_fault_of_ours(receivers, monkeypatch):
    async def read(_):
        raise RuntimeError("Connection closed.")  # as aiohttp says it

    monkeypatch.setattr("aiohttp.StreamReader.read", read)
    assert receivers.post(ONE)[0] == 408
    assert receivers.requests("incomplete") == 1


def test_our_own_fault_is_said_and_tells_nothing_of_its_inside(receivers, monkeypatch):
    def fail(*_):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(otlp_http, "inflate", fail)
    assert receivers.post(gzip.compress(ONE), PROTOBUF | GZIP)[0] == 500
    assert value_of(receivers.metrics, REQUESTS, "http", "failed") == 1
    monkeypatch.setattr(receivers.queue, "put", fail)
    code, error = receivers.call(ONE)
    assert (code, error.details()) == (CODE.INTERNAL, "internal error")
    status, body, _ = receivers.post(ONE)
    assert status == 500
    assert b"secret" not in body


def test_the_size_limit_holds_for_what_comes_out_of_gzip_too():
    with receiving(message_max_mib=1) as receivers:
        large = bytes(16 * MIB)
        bomb = gzip.compress(large)
        assert len(bomb) < MIB
        assert receivers.post(bomb, PROTOBUF | GZIP)[0] == 413
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            assert receivers.call(large[: 2 * MIB], compression=compression)[0] is CODE.RESOURCE_EXHAUSTED
        assert (receivers.call(ONE)[0], receivers.post(ONE)[0]) == (CODE.OK, 200)


def test_an_export_beyond_the_four_mebibytes_of_grpc_is_accepted(receivers):
    assert receivers.call(ONE * (4 * MIB // len(ONE) + 1))[0] is CODE.OK


def test_health_serves_until_the_stop_begins(receivers):
    with grpc.insecure_channel(f"127.0.0.1:{receivers.grpc.port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=100)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=100)
        assert caught.value.code() is CODE.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest(service=""), timeout=100)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        receivers.halt()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING


HEAD = b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\n"
LENGTH = HEAD + b"Content-Length: %d\r\n\r\n"


@pytest.mark.parametrize(
    ("rest", "status", "outcome"),
    [
        (b"Content-Length: 99999999999\r\n\r\n", b"413", "too_large"),
        (b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", b"411", "undecodable"),
    ],
)
def test_a_body_beyond_the_limit_or_without_a_length_is_refused_before_it_is_read(receivers, rest, status, outcome):
    with receivers.connect(HEAD + rest) as client:
        assert client.recv(100).startswith(b"HTTP/1.1 " + status)
    assert receivers.requests(outcome) == 1
    assert receivers.post(ONE)[0] == 200


def test_a_body_that_trickles_ends_with_408_however_often_a_byte_comes(receivers, monkeypatch):
    monkeypatch.setattr(budget, "RECEIVE_TIMEOUT_S", 0.3)
    with receivers.connect(LENGTH % 1000) as client:
        client.settimeout(0.05)

        def answer():
            with contextlib.suppress(TimeoutError, BrokenPipeError):
                client.sendall(b"\x0a")
                return client.recv(100)

        assert eventually(answer).startswith(b"HTTP/1.1 408 ")
    assert receivers.requests("incomplete") == 1


def test_connections_that_dawdle_or_go_away_in_the_middle_of_a_body_give_way_to_one_that_sends(receivers):
    receivers.connect(LENGTH % 1000 + b"abc").close()
    eventually(lambda: receivers.requests("incomplete") == 1)
    with contextlib.ExitStack() as stack:
        for sent in (b"", b"POST /v1", LENGTH % 1000, LENGTH % 1000 + b"abc") * 25:
            stack.enter_context(receivers.connect(sent))
        assert [receivers.post(ONE)[0] for _ in range(5)] == [200] * 5


def test_senders_of_large_bodies_that_never_end_keep_nobody_out():
    with receiving(message_max_mib=1) as receivers, ThreadPoolExecutor(12) as senders, contextlib.ExitStack() as stack:
        for _ in range(12):
            client = stack.enter_context(receivers.connect(LENGTH % (MIB - 1)))
            senders.submit(client.sendall, bytes(MIB - 2))
        for _ in range(3):  # who finds no room in two seconds hears 503, and an exporter comes again
            eventually(lambda: receivers.post(ONE)[0] == 200)
