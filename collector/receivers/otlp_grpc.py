"""OTLP/gRPC: TraceService/Export on raw bytes, and the standard health service.

A generic handler without a deserialiser, because grpcio answers INTERNAL to bytes that do not decode where OTLP wants
INVALID_ARGUMENT, and because parsing in full costs more than learning. The options that have dangerous defaults are
written out; ``maximum_concurrent_rpcs`` is not used, since its refusal carries no RetryInfo and tells a correct client
to drop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent import futures
from typing import NoReturn

import grpc
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc

from collector.admission import Refused
from collector.config import GrpcConfig, parse_endpoint
from collector.errors import StartError
from collector.status import INTERNAL, Answer, answer
from collector.telemetry import Transport

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
METHOD = f"/{SERVICE}/Export"
RESPONSE_OK = b""
"""An ExportTraceServiceResponse with partial_success unset."""

DEADLINE_MARGIN_S = 0.5
"""A handler stops waiting for room this long before the caller's deadline, so that the caller hears the reason."""

Offer = Callable[[bytes, str, Transport, float | None], Refused | None]

_log = logging.getLogger(__name__)


class _ExportHandler(grpc.GenericRpcHandler):
    """Routes the one method we serve; grpcio answers UNIMPLEMENTED to all others."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self._method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(self._export)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """The handler of a method, None if it is not ours."""
        return self._method if handler_call_details.method == METHOD else None

    def _export(self, payload: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            refused = self._offer(payload, context.peer(), Transport.GRPC, _patience_s(context))
        except Exception:  # noqa: BLE001 -- an exception's text would reach the client as status UNKNOWN
            _log.exception("export failed")
            _abort(context, INTERNAL)
        if refused is not None:
            _abort(context, answer(refused))
        return RESPONSE_OK


def _patience_s(context: grpc.ServicerContext) -> float | None:
    remaining_s = context.time_remaining()
    return None if remaining_s is None else max(remaining_s - DEADLINE_MARGIN_S, 0.0)


def _abort(context: grpc.ServicerContext, reply: Answer) -> NoReturn:
    context.set_trailing_metadata(reply.trailers)
    context.abort(reply.code, reply.text)


class OtlpGrpcReceiver:
    """A server on one endpoint; ``start`` once, ``stop`` once."""

    def __init__(self, config: GrpcConfig, offer: Offer) -> None:
        self._endpoint = parse_endpoint(config.endpoint)
        self._health = grpc_health.HealthServicer()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(config.threads, thread_name_prefix="grpc"),
            handlers=[_ExportHandler(offer)],
            options=[
                ("grpc.so_reuseport", 0),  # by default a second sidecar on the same port starts and shares it silently
                ("grpc.max_receive_message_length", config.max_recv_msg_size_mib << 20),  # holds after decompression
                ("grpc.max_concurrent_streams", config.max_concurrent_streams),
            ],
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def start(self) -> int:
        """Bind and serve; the port taken."""
        endpoint = str(self._endpoint)
        try:
            port: int = self._server.add_insecure_port(endpoint)
        except RuntimeError:
            port = 0
        if port == 0:
            raise StartError(
                f"cannot listen on {endpoint} for OTLP/gRPC: the port is in use or the address is not ours"
            )
        self._server.start()
        for name in ("", SERVICE):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return port

    def stop(self, grace_s: float) -> None:
        """Health flips, new calls are UNAVAILABLE, calls in flight get ``grace_s`` to finish."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_s).wait(grace_s + 1.0)
