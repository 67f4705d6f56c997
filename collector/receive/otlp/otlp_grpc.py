"""OTLP/gRPC: TraceService/Export on raw bytes, and the standard health service.

A generic handler without a deserialiser, because grpcio answers INTERNAL to bytes that do not decode where OTLP wants
INVALID_ARGUMENT, and because parsing in full costs more than learning. The options that have dangerous defaults are
written out; ``maximum_concurrent_rpcs`` is not used, since its refusal carries no RetryInfo and tells a correct client
to drop.

On the wire a unary call is a stream of one message. Taking it as a stream puts the wait for that message into our
hands: a caller without a token is answered before anything is read, and one that never sends is cancelled, since each
call that waits holds one of few threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import NoReturn

import grpc
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc

from collector.config import GrpcConfig, parse_endpoint
from collector.receive.admission import Refused
from collector.receive.status import INCOMPLETE, INTERNAL, UNAUTHENTICATED, answer
from collector.receive.status import Answer as Reply
from collector.runtime import Clock, StartError, SystemClock
from collector.telemetry import Outcome, Transport

from .grpc_probe import Answer, call_health
from .watch import SelfCheck

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
METHOD = f"/{SERVICE}/Export"
RESPONSE_OK = b""
"""An ExportTraceServiceResponse with partial_success unset."""

DEADLINE_MARGIN_S = 0.5
"""A handler stops waiting for room this long before the caller's deadline, so that the caller hears the reason."""

KEEPALIVE_S = 60
HANDSHAKE_S = 10
WATCH_S = 0.5
CHECK_TIMEOUT_S = 5.0
STALLED_S = 1.0
"""When too few threads are left, calls that have waited this long for their message give way."""

Offer = Callable[[bytes, str, Transport, float | None], Refused | None]
TurnAway = Callable[[Transport, Outcome], None]
Accepts = Callable[[str | None], bool]

_log = logging.getLogger(__name__)


class _Arrivals:
    """Calls whose message is not here yet; cancelled when they take too long, or too many threads."""

    def __init__(self, timeout_s: float, waiting_max: int, clock: Clock) -> None:
        self._timeout_ns = int(timeout_s * 1e9)
        self._waiting_max = waiting_max
        self._clock = clock
        self._lock = threading.Lock()
        self._since_ns: dict[grpc.ServicerContext, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="grpc-arrivals", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def receive(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes | None:
        """The message of a call; None if it ended without one."""
        with self._lock:
            self._since_ns[context] = self._clock.monotonic_ns()
        try:
            return next(messages, None)
        except grpc.RpcError:
            return None
        finally:
            with self._lock:
                del self._since_ns[context]

    def overdue(self) -> list[grpc.ServicerContext]:
        """Calls to give up."""
        now_ns = self._clock.monotonic_ns()
        with self._lock:
            crowded = len(self._since_ns) >= self._waiting_max
            patience_ns = min(self._timeout_ns, int(STALLED_S * 1e9)) if crowded else self._timeout_ns
            return [context for context, since_ns in self._since_ns.items() if now_ns - since_ns > patience_ns]

    def _run(self) -> None:
        while not self._stop.wait(WATCH_S):
            for context in self.overdue():
                context.cancel()


class _ExportHandler(grpc.GenericRpcHandler):
    """Routes the one method we serve; grpcio answers UNIMPLEMENTED to all others."""

    def __init__(self, offer: Offer, arrivals: _Arrivals, accepts: Accepts | None, turn_away: TurnAway) -> None:
        self._offer = offer
        self._arrivals = arrivals
        self._accepts = accepts
        self._turn_away = turn_away
        self._method: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(self._export)
        self._stranger: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(self._refuse)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """The handler of a method, None if it is not ours."""
        if handler_call_details.method != METHOD:
            return None
        if self._accepts is not None and not self._accepts(_authorization(handler_call_details)):
            return self._stranger
        return self._method

    def _export(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        payload = self._arrivals.receive(messages, context)
        if payload is None:
            self._turn_away(Transport.GRPC, Outcome.INCOMPLETE)
            _abort(context, INCOMPLETE)
        try:
            refused = self._offer(payload, context.peer(), Transport.GRPC, _patience_s(context))
        except Exception:  # noqa: BLE001 -- an exception's text would reach the client as status UNKNOWN
            _log.exception("export failed")
            _abort(context, INTERNAL)
        if refused is not None:
            _abort(context, answer(refused))
        return RESPONSE_OK

    def _refuse(self, _: Iterator[bytes], context: grpc.ServicerContext) -> NoReturn:
        self._turn_away(Transport.GRPC, Outcome.UNAUTHENTICATED)
        _abort(context, UNAUTHENTICATED)


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    values = [value for key, value in details.invocation_metadata if key == "authorization"]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


def _patience_s(context: grpc.ServicerContext) -> float | None:
    remaining_s = context.time_remaining()
    return None if remaining_s is None else max(remaining_s - DEADLINE_MARGIN_S, 0.0)


def _abort(context: grpc.ServicerContext, reply: Reply) -> NoReturn:
    context.set_trailing_metadata(reply.trailers)
    context.abort(reply.code, reply.text)


class OtlpGrpcReceiver:
    """A server on one endpoint; ``start`` once, ``stop`` once."""

    def __init__(
        self,
        config: GrpcConfig,
        offer: Offer,
        *,
        credentials: grpc.ServerCredentials | None = None,
        accepts: Accepts | None = None,
        turn_away: TurnAway = lambda _transport, _outcome: None,
        clock: Clock | None = None,
        check_in: Callable[[], None] = lambda: None,
    ) -> None:
        self._port = 0
        self._endpoint = parse_endpoint(config.endpoint)
        self._credentials = credentials
        self._health = grpc_health.HealthServicer()
        waiting_max = max(config.threads - 2, 1)
        self._arrivals = _Arrivals(config.receive_timeout_s, waiting_max, clock or SystemClock())
        pool = futures.ThreadPoolExecutor(config.threads, thread_name_prefix="grpc")
        self.check = SelfCheck(self._call, pool, check_in)
        self._server = grpc.server(
            pool,
            handlers=[_ExportHandler(offer, self._arrivals, accepts, turn_away)],
            options=[
                ("grpc.so_reuseport", 0),  # by default a second sidecar on the same port starts and shares it silently
                ("grpc.max_receive_message_length", config.max_recv_msg_size_mib << 20),  # holds after decompression
                ("grpc.max_concurrent_streams", config.max_concurrent_streams),
                ("grpc.max_allowed_incoming_connections", config.max_connections),
                ("grpc.max_metadata_size", 16 << 10),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
                ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),  # a peer that is gone gives its connection back
                ("grpc.keepalive_timeout_ms", 20_000),
            ],
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def start(self) -> int:
        """Bind and serve; the port taken."""
        endpoint = str(self._endpoint)
        try:
            if self._credentials is None:
                port: int = self._server.add_insecure_port(endpoint)
            else:
                port = self._server.add_secure_port(endpoint, self._credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            raise StartError(
                f"cannot listen on {endpoint} for OTLP/gRPC: the port is in use or the address is not ours"
            )
        self._server.start()
        self._arrivals.start()
        for name in ("", SERVICE):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._port = port
        self.check.start()
        return port

    def _call(self) -> Answer:
        return call_health(
            self._endpoint.address, self._port, tls=self._credentials is not None, timeout_s=CHECK_TIMEOUT_S
        )

    def stop(self, grace_s: float) -> None:
        """Health flips, new calls are UNAVAILABLE, calls in flight get ``grace_s`` to finish."""
        self.check.stop()
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_s).wait(grace_s + 1.0)
        self._arrivals.stop()
