"""What a client sees: the status table of OTLP/gRPC, against a real server on a real port."""

from __future__ import annotations

import gzip
import threading

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans

from collector.config import Config
from collector.ingest import otlp_grpc
from collector.ingest.intake import ReceiveBudget
from collector.ingest.otlp_grpc import SERVICE, OtlpGrpcReceiver
from collector.runtime import IoLoop
from collector.runtime.filesystem import StartError
from collector.telemetry.reasons import Outcome
from collector.telemetry.table import ACCEPTED, REQUESTS, SPANS
from tests.support import otlp_bytes as otlp
from tests.support.clocks import eventually
from tests.support.receptions import MIB, Reception
from tests.support.sidecars import call_export
from tests.support.step_exports import make_export

CODE = grpc.StatusCode


def make_receiver(config, intake, grace_s=0.0):
    budget = ReceiveBudget(config.message_max_mib * MIB)
    return OtlpGrpcReceiver(config, intake, budget, io=IoLoop(), grace_s=grace_s)


class Receiver(Reception):
    """On a port of its own."""

    def __init__(self, offer=None, *, config=None, grace_s=0.0, **room):
        super().__init__(offer, **room)
        self.server = make_receiver(config or Config(listen="127.0.0.1:0"), self.intake, grace_s)
        self.server.start()
        self.port = self.server.port

    def count(self, metric, *labels):
        return self.metrics.value(metric, "grpc", *labels)


@pytest.fixture
def receiver():
    made = Receiver(grace_s=0.5)
    yield made
    made.server.stop()


def status_of(port, payload, **kwargs):
    try:
        return CODE.OK, call_export(port, payload, **kwargs)
    except grpc.RpcError as error:
        return error.code(), error


ONE = make_export().SerializeToString()
EMPTY_ENVELOPES = ExportTraceServiceRequest()
EMPTY_ENVELOPES.resource_spans.add().scope_spans.add()
NEWER_PROTOCOL = ONE + b"\xba\x3e\x03abc"  # field 999 at the top


@pytest.mark.parametrize(
    ("payload", "code", "outcome"),
    [
        pytest.param(ONE, CODE.OK, Outcome.ACCEPTED, id="spans"),
        pytest.param(b"", CODE.OK, Outcome.ACCEPTED, id="empty request"),
        pytest.param(EMPTY_ENVELOPES.SerializeToString(), CODE.OK, Outcome.ACCEPTED, id="empty envelopes"),
        pytest.param(NEWER_PROTOCOL, CODE.OK, Outcome.ACCEPTED, id="unknown field of a newer protocol"),
        pytest.param(b"\xff\xff\xff\xff", CODE.INVALID_ARGUMENT, Outcome.UNDECODABLE, id="random bytes"),
        pytest.param(ONE[:-1], CODE.INVALID_ARGUMENT, Outcome.UNDECODABLE, id="cut short"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", CODE.INVALID_ARGUMENT, Outcome.UNDECODABLE, id="another protocol"),
        pytest.param(
            ExportTraceServiceRequest(
                resource_spans=[{"scope_spans": [ScopeSpans(spans=[{}] * 70_000)]}]
            ).SerializeToString(),
            CODE.INVALID_ARGUMENT,
            Outcome.TOO_LARGE,
            id="more spans than anybody sends",
        ),
    ],
)
def test_every_outcome_has_the_status_that_the_specification_gives_it(receiver, payload, code, outcome):
    got, reply = status_of(receiver.port, payload)
    assert got is code
    if code is CODE.OK:
        assert not ExportTraceServiceResponse.FromString(reply).HasField("partial_success")
    assert receiver.count(REQUESTS, outcome) == 1


def test_a_full_queue_is_resource_exhausted_with_the_retry_hint_in_both_encodings(receiver):
    receiver.fill()
    code, error = status_of(receiver.port, ONE)
    assert code is CODE.RESOURCE_EXHAUSTED
    trailers = dict(error.trailing_metadata())
    python_hint = error_details_pb2.RetryInfo.FromString(trailers["google.rpc.retryinfo-bin"])
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    standard_hint = error_details_pb2.RetryInfo()
    assert status.code == CODE.RESOURCE_EXHAUSTED.value[0]
    assert isinstance(status.details[0], any_pb2.Any)
    assert status.details[0].Unpack(standard_hint)
    assert python_hint == standard_hint
    assert 0.5 <= python_hint.retry_delay.ToTimedelta().total_seconds() <= 1.9
    assert receiver.count(SPANS, "queue_full") == 1


def test_a_waiting_export_enters_as_soon_as_there_is_room():
    receiver = Receiver(wait_s=20)
    try:
        receiver.fill()
        answers = []
        caller = threading.Thread(target=lambda: answers.append(status_of(receiver.port, ONE)[0]))
        caller.start()
        eventually(lambda: receiver.queue.asked == 1)
        assert not answers
        receiver.queue.done(receiver.queue.take(MIB, 0))
        caller.join(60)
        assert answers == [CODE.OK]
    finally:
        receiver.server.stop()


def test_a_waiting_export_hears_the_reason_before_its_own_deadline(monkeypatch):
    monkeypatch.setattr(otlp_grpc, "DEADLINE_MARGIN_S", 59.0)  # half a second is short on a busy machine
    receiver = Receiver(wait_s=100)
    try:
        receiver.fill()
        assert status_of(receiver.port, ONE, timeout_s=60)[0] is CODE.RESOURCE_EXHAUSTED
    finally:
        receiver.server.stop()


def test_while_exports_wait_for_room_health_and_empty_calls_still_get_through():
    receiver = Receiver(wait_s=60)
    try:
        receiver.fill()
        callers = [threading.Thread(target=status_of, args=(receiver.port, ONE)) for _ in range(6)]
        for caller in callers:
            caller.start()
        eventually(lambda: receiver.queue.asked == 6)
        assert status_of(receiver.port, b"")[0] is CODE.OK
        receiver.queue.close()
        for caller in callers:
            caller.join(60)
        assert receiver.count(SPANS, "shutting_down") == 6
    finally:
        receiver.server.stop()


def test_shutting_down_is_unavailable(receiver):
    receiver.queue.close()
    assert status_of(receiver.port, ONE)[0] is CODE.UNAVAILABLE


def test_our_own_fault_is_internal_and_tells_nothing_of_its_inside():
    async def offer(*_):
        raise RuntimeError("secret detail")

    receiver = Receiver(offer)
    try:
        code, error = status_of(receiver.port, ONE)
        assert (code, error.details()) == (CODE.INTERNAL, "internal error")
    finally:
        receiver.server.stop()


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_the_size_limit_holds_after_decompression(compression):
    receiver = Receiver(config=Config(listen="127.0.0.1:0", message_max_mib=1), capacity_bytes=4 * MIB)
    try:
        bomb = bytes(2 * MIB)
        assert len(gzip.compress(bomb)) < 10_000
        assert status_of(receiver.port, bomb, compression=compression)[0] is CODE.RESOURCE_EXHAUSTED
        assert status_of(receiver.port, ONE, compression=compression)[0] is CODE.OK
    finally:
        receiver.server.stop()


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_spans_of_others_are_acknowledged_and_counted_and_damaged_exports_refused(receiver, compression):
    foreign = otlp.export(("fastapi", [otlp.step_span([b""])] * 300))
    assert status_of(receiver.port, foreign, compression=compression)[0] is CODE.OK
    assert receiver.count(SPANS, ACCEPTED) == 300
    (export,) = receiver.queue.take(MIB, 1.0).items
    assert (export.spans, export.payload) == (300, foreign)
    code, error = status_of(receiver.port, foreign[:-3], compression=compression)
    assert (code, error.details()) == (CODE.INVALID_ARGUMENT, "not an ExportTraceServiceRequest")
    assert receiver.count(SPANS, ACCEPTED) == 300
    assert receiver.count(REQUESTS, Outcome.UNDECODABLE) == 1


def test_an_export_beyond_the_old_four_mebibytes_is_accepted():
    receiver = Receiver(capacity_bytes=MIB)
    try:
        big = make_export(spans=120, steps_per_span=100).SerializeToString()
        assert len(big) > 4 * MIB
        assert status_of(receiver.port, big)[0] is CODE.OK
    finally:
        receiver.server.stop()


@pytest.mark.parametrize(
    "method",
    [
        "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
        "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
        f"/{SERVICE}/Import",
    ],
)
def test_other_signals_are_unimplemented(receiver, method):
    with grpc.insecure_channel(f"127.0.0.1:{receiver.port}") as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(method)(b"", timeout=100)
    assert caught.value.code() is CODE.UNIMPLEMENTED


def test_health_serves_until_the_stop_begins(receiver):
    with grpc.insecure_channel(f"127.0.0.1:{receiver.port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=100)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=100)
        assert caught.value.code() is CODE.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest(service=""), timeout=100)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        receiver.server.stop()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_second_server_on_the_same_port_is_one_clear_sentence(receiver):
    second = make_receiver(Config(listen=f"127.0.0.1:{receiver.port}"), receiver.intake)
    with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{receiver.port}.*in use"):
        second.start()
