"""OTLP/gRPC on grpc.aio: TraceService/Export on raw bytes, and the standard health service.

A generic handler without a deserialiser, because grpcio answers INTERNAL to bytes that do not decode where OTLP wants
INVALID_ARGUMENT, and because parsing in full costs more than learning. The options that have dangerous defaults are
written out; ``maximum_concurrent_rpcs`` is not used, since its refusal carries no RetryInfo and tells a correct client
to drop.

On the wire a unary call is a stream of one message. Taking it as a stream puts the wait for that message into our
hands: a caller without a token is answered before anything is read, and a call that never sends ends by the time limit
of the budget. A call that waits costs a coroutine, and no thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as grpc_health

from collector.config import Config, parse_endpoint
from collector.runtime import cannot_listen
from collector.telemetry import Outcome, Signal, Transport

from .access import TlsFiles
from .budget import Receiving
from .consumer import ExportConsumer
from .forward import METHODS
from .status import Answer, answer

METHOD = METHODS[Signal.TRACES]
SERVICE = METHOD.split("/")[1]
_SIGNALS = {method: signal for signal, method in METHODS.items()}
RESPONSE_OK = b""
"""An ExportTraceServiceResponse with partial_success unset."""

KEEPALIVE_MS = 60_000
"""A peer that is gone in a call gives its place back."""
KEEPALIVE_TIMEOUT_MS = 20_000
HANDSHAKE_MS = 2_500
"""Whoever connects and says nothing holds a place for this long."""
CALLS_MAX = 8
"""Calls open at once on one connection; an exporter has one."""
CONNECTIONS_PER_ENGINE = 8
"""A newcomer beyond those of ``engines_max`` is closed. An idle one costs 16 kB."""
IDLE_S = 60.0
"""Connections without a call for so long are closed. A connection names a sender without an id."""
METADATA_BYTES_MAX = 16 << 10
WINDOW_BYTES = 256 << 10
"""What a caller may send of a call before it hears from us: most exports whole, 5 MB/s over 50 ms of distance. To find
a window for itself, gRPC would send a ping with each export, and set timers that wake its threads."""

_Context = grpc.aio.ServicerContext[bytes, bytes]


class _ExportHandler(grpc.GenericRpcHandler):
    """Routes the methods we serve; grpcio answers UNIMPLEMENTED to all others."""

    def __init__(self, consumer: ExportConsumer) -> None:
        self._consumer = consumer
        self._methods: dict[Signal, grpc.RpcMethodHandler[bytes, bytes]] = {
            signal: grpc.stream_unary_rpc_method_handler(partial(self._export, signal)) for signal in Signal
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """The handler of a method, None if it is not ours."""
        method = handler_call_details.method
        served = {METHOD: Signal.TRACES} if not self._consumer.can_forward else _SIGNALS
        return self._methods[served[method]] if method in served else None

    async def _export(self, signal: Signal, _messages: AsyncIterator[bytes], context: _Context) -> bytes:
        consumer, refused = self._consumer, None
        if consumer.lets_in(_authorization(context)):
            # read from the context: the iterator would keep the message, and goes only when garbage is collected
            read, size_bytes = partial(_read_message, context), consumer.message_bytes_max
            refused = await consumer.receive(signal, Transport.GRPC, context.peer(), size_bytes, read)
        else:
            consumer.count_call(Transport.GRPC, Outcome.UNAUTHENTICATED)
            refused = answer(Outcome.UNAUTHENTICATED)
        if refused is not None:  # an abort raises, and what raises must not refer to a message of 8 MiB
            await context.abort(refused.code, refused.text, refused.trailers)
        return RESPONSE_OK


async def _read_message(context: _Context, receiving: Receiving) -> bytes | Answer:
    message = await receiving.read(context.read())
    return message if isinstance(message, bytes) else answer(Outcome.INCOMPLETE)  # the call ended without one


def _authorization(context: _Context) -> str | None:
    values = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


class OtlpGrpcReceiver:
    """A server on one endpoint; ``port`` is known after ``start``, 0 before."""

    def __init__(
        self,
        config: Config,
        consumer: ExportConsumer,
        *,
        stop_timeout_s: float,
        tls: TlsFiles | None = None,
    ) -> None:
        self.port = 0
        self._config = config
        self._stop_timeout_s = stop_timeout_s
        self._tls = tls
        self._health = grpc_health.HealthServicer()
        self._handler = _ExportHandler(consumer)
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Bind and serve, or raise StartError."""
        config = self._config
        self._server = server = grpc.aio.server(
            handlers=[self._handler],
            options=[
                ("grpc.so_reuseport", 0),  # by default a second sidecar on the same port starts and shares it silently
                ("grpc.max_receive_message_length", config.message_max_mib << 20),  # holds after decompression
                ("grpc.max_concurrent_streams", CALLS_MAX),
                ("grpc.max_allowed_incoming_connections", CONNECTIONS_PER_ENGINE * config.engines_max),
                ("grpc.max_metadata_size", METADATA_BYTES_MAX),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
            ],
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        endpoint = parse_endpoint(config.listen)
        try:
            if self._tls is None:
                self.port = server.add_insecure_port(str(endpoint))
            else:
                self.port = server.add_secure_port(str(endpoint), self._tls.grpc_credentials())
        except RuntimeError:
            why = "the port is in use or the address is not ours"
            raise cannot_listen(endpoint, "OTLP/gRPC", "listen", why) from None
        await server.start()
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> bool:
        """Health flips, new calls are UNAVAILABLE, calls in flight get ``stop_timeout_s`` to finish."""
        if self._server is not None:
            await self._health.enter_graceful_shutdown()
            await self._server.stop(self._stop_timeout_s)
        return True
