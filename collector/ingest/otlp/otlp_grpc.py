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

import contextlib
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import NoReturn

import grpc
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc

from collector.config import GrpcConfig, parse_endpoint
from collector.ingest.intake import HINT_MIN_S, Refused
from collector.ingest.status import INCOMPLETE, INTERNAL, UNAUTHENTICATED, Answer, answer
from collector.runtime import Clock, Health, StartError, Task
from collector.telemetry import Outcome

from .way_in import CHECK_EVERY_S, WayIn

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
METHOD = f"/{SERVICE}/Export"
RESPONSE_OK = b""
"""An ExportTraceServiceResponse with partial_success unset."""

DEADLINE_MARGIN_S = 0.5
"""A handler stops waiting for room this long before the caller's deadline, so that the caller hears the reason."""

KEEPALIVE_S = 60
HANDSHAKE_S = 2.5
"""Whoever connects and says nothing holds a place for this long."""
THREADS = 8
"""Exports handled at once."""
CALLS_MAX = 8
"""Calls open at once on one connection; an exporter has one."""
RECEIVE_TIMEOUT_S = 10.0
"""How long the message of a call may take to come: the deadline of an SDK's exporter."""
IDLE_S = 600.0
"""Connections without a call for so long are closed. A connection names a sender without an id."""
WINDOW_BYTES = 256 << 10
"""What a caller may send of a call before it hears from us: most exports whole, 5 MB/s over 50 ms of distance. To find
a window for itself, gRPC would send a ping with each export, and set timers that wake its threads."""
WATCH_S = 2.0
WATCH_OFTEN_S = 0.1
"""While too few threads are left."""
GIVEN_UP_MAX = 1024
"""Connections remembered, of those that kept a thread waiting for nothing."""
STALLED_S = 1.0
"""When too few threads are left, calls that have waited this long for their message give way."""

NAME = "grpc-receiver"
CHECK_TIMEOUT_S = 5.0
"""For the listener to take a connection, and for the handlers' pool to run a task."""
CHECK_IN_TIMEOUT_S = 40.0
"""Two checks may fail, as in a process that got no processor for a while."""

_log = logging.getLogger(__name__)


class _Arrivals:
    """Calls whose message is not here yet. Each holds a thread; they are given up when they take too long.

    While few threads are left, a call is given up after a second. While others wait for a thread, it is given up after
    a share of that second, which all calls of its connection have together. A connection of which a call was given up
    waits for no message while few threads are left, until one of its calls brings one.
    """

    def __init__(self, timeout_s: float, waiting_max: int, clock: Clock, *, wake: Callable[[], None]) -> None:
        """``wake`` is called when few threads are left, so that :meth:`look` is called soon."""
        self._timeout_ns = int(timeout_s * 1e9)
        self._waiting_max = waiting_max
        self._clock = clock
        self._wake = wake
        self._lock = threading.Lock()
        """Guards everything below."""
        self._without_thread = 0
        self._waiting: dict[grpc.ServicerContext, tuple[str, int]] = {}
        self._given_up: dict[str, None] = {}  # connections, the last one at the end
        self._looks_often = False

    def announce(self) -> None:
        """A call has come and will get a thread."""
        with self._lock:
            self._without_thread += 1

    def begin(self) -> None:
        """A call has got its thread."""
        with self._lock:
            self._without_thread -= 1

    def receive(self, messages: Iterator[bytes], peer: str, context: grpc.ServicerContext) -> bytes | Refused | None:
        """The message of a call; None if it ended without one; a refusal if others need the thread."""
        with self._lock:
            if peer in self._given_up and len(self._waiting) >= self._waiting_max:
                return Refused(Outcome.QUEUE_FULL, HINT_MIN_S)
            self._waiting[context] = (peer, self._clock.monotonic_ns())
            wakes = len(self._waiting) >= self._waiting_max and not self._looks_often
            self._looks_often = self._looks_often or wakes
        if wakes:
            self._wake()
        message = None
        with contextlib.suppress(grpc.RpcError):
            message = next(messages, None)
        with self._lock:
            del self._waiting[context]
            if message is not None:
                self._given_up.pop(peer, None)
        return message

    def look(self) -> float:
        """Give up silent calls; the seconds until the next look."""
        with self._lock:
            overdue = self._overdue()
            for peer in overdue.values():
                self._given_up.pop(peer, None)
                self._given_up[peer] = None
            while len(self._given_up) > GIVEN_UP_MAX:
                del self._given_up[next(iter(self._given_up))]
            pause_s = WATCH_OFTEN_S if self._looks_often else WATCH_S
            self._looks_often = self._looks_often and bool(self._waiting)
        for call in overdue:
            call.cancel()
        return pause_s

    def _overdue(self) -> dict[grpc.ServicerContext, str]:
        """Calls to give up, and their connections."""
        waiting, now_ns = self._waiting, self._clock.monotonic_ns()
        crowded = len(waiting) >= self._waiting_max
        calls = Counter(peer for peer, _ in waiting.values()) if crowded and self._without_thread else None

        def patience_ns(peer: str) -> int:
            stalled_ns = int(STALLED_S * 1e9) // (calls[peer] if calls is not None else 1)
            return min(self._timeout_ns, stalled_ns) if crowded else self._timeout_ns

        return {call: peer for call, (peer, since_ns) in waiting.items() if now_ns - since_ns > patience_ns(peer)}


class _ExportHandler(grpc.GenericRpcHandler):
    """Routes the one method we serve; grpcio answers UNIMPLEMENTED to all others."""

    def __init__(self, way_in: WayIn, arrivals: _Arrivals) -> None:
        self._way_in = way_in
        self._arrivals = arrivals
        self._method: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(self._export)
        self._stranger: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(self._refuse)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """The handler of a method, None if it is not ours."""
        if handler_call_details.method != METHOD:
            return None
        self._arrivals.announce()
        way_in = self._way_in
        admitted = way_in.is_open or way_in.admits(_authorization(handler_call_details))
        return self._method if admitted else self._stranger

    def _export(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        self._arrivals.begin()
        peer = context.peer()
        payload = self._arrivals.receive(messages, peer, context)
        if payload is None:
            self._way_in.turn_away(Outcome.INCOMPLETE)
            _abort(context, INCOMPLETE)
        if isinstance(payload, Refused):
            self._way_in.turn_away(payload.reason)
            _abort(context, answer(payload, "too many calls wait for their message"))
        try:
            refused = self._way_in.offer(payload, peer, _patience_s(context))
        except Exception:  # noqa: BLE001 -- an exception's text would reach the client as status UNKNOWN
            _log.exception("export failed")
            _abort(context, INTERNAL)
        if refused is not None:
            _abort(context, answer(refused))
        return RESPONSE_OK

    def _refuse(self, _: Iterator[bytes], context: grpc.ServicerContext) -> NoReturn:
        self._arrivals.begin()
        self._way_in.turn_away(Outcome.UNAUTHENTICATED)
        _abort(context, UNAUTHENTICATED)


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    values = [value for key, value in details.invocation_metadata if key == "authorization"]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


def _patience_s(context: grpc.ServicerContext) -> float | None:
    remaining_s = context.time_remaining()
    return None if remaining_s is None else max(remaining_s - DEADLINE_MARGIN_S, 0.0)


def _abort(context: grpc.ServicerContext, reply: Answer) -> NoReturn:
    context.set_trailing_metadata(reply.trailers)
    context.abort(reply.code, reply.text)


class OtlpGrpcReceiver:
    """A server on one endpoint; ``port`` is known after ``start``, 0 before."""

    def __init__(
        self,
        config: GrpcConfig,
        way_in: WayIn,
        *,
        health: Health,
        clock: Clock,
        grace_s: float,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self.port = 0
        self._endpoint = parse_endpoint(config.endpoint)
        self._way_in = way_in
        self._grace_s = grace_s
        self._credentials = credentials
        self._health_service = grpc_health.HealthServicer()
        self._watch = Task("grpc-arrivals", self._look_at_calls)
        waiting_max = THREADS - 2
        arrivals = _Arrivals(RECEIVE_TIMEOUT_S, waiting_max, clock, wake=self._watch.wake)
        self._arrivals = arrivals
        self._check = Task(
            NAME, self._check_server, health=health, turn_timeout_s=CHECK_IN_TIMEOUT_S, is_well=self._is_well
        )
        self._serves = True
        self._pool = futures.ThreadPoolExecutor(THREADS, thread_name_prefix="grpc")
        self._server = grpc.server(
            self._pool,
            handlers=[_ExportHandler(way_in, arrivals)],
            options=[
                ("grpc.so_reuseport", 0),  # by default a second sidecar on the same port starts and shares it silently
                ("grpc.max_receive_message_length", config.max_recv_msg_size_mib << 20),  # holds after decompression
                ("grpc.max_concurrent_streams", CALLS_MAX),
                ("grpc.max_allowed_incoming_connections", config.max_connections),
                ("grpc.max_metadata_size", 16 << 10),
                ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
                ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
                ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),  # a peer that is gone in a call gives its place back
                ("grpc.keepalive_timeout_ms", 20_000),
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
            ],
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health_service, self._server)

    def start(self) -> None:
        """Bind and serve, or raise StartError."""
        self.port = self._bind()
        self._server.start()
        self._watch.start()
        for name in ("", SERVICE):
            self._health_service.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._check.start()

    def _bind(self) -> int:
        endpoint = str(self._endpoint)
        port = 0
        with contextlib.suppress(RuntimeError):
            if self._credentials is None:
                port = self._server.add_insecure_port(endpoint)
            else:
                port = self._server.add_secure_port(endpoint, self._credentials)
        if port == 0:
            raise StartError(
                f"cannot listen on {endpoint} for OTLP/gRPC: the port is in use or the address is not ours"
            )
        return port

    def stop(self) -> bool:
        """Health flips, new calls are UNAVAILABLE, calls in flight get ``grace_s`` to finish."""
        self._check.request_stop()
        self._health_service.enter_graceful_shutdown()
        self._server.stop(self._grace_s).wait(self._grace_s + 1.0)
        self._watch.request_stop()
        return True

    def _look_at_calls(self) -> float:
        return self._arrivals.look()

    # --- does it still receive --------------------------------------------------------------------------------------

    def _is_well(self) -> bool:
        return self._serves and self._way_in.flows()

    def _check_server(self) -> float:
        """A turn of the check: somebody listens, and the handlers' threads move."""
        self._serves = self._listens() and self._pool_runs()
        return CHECK_EVERY_S

    def _listens(self) -> bool:
        """Whether the listener takes a connection; one that it closes at once, for lack of a place, is as good."""
        address = self._endpoint.address
        for own_address in (address, "127.0.0.1") if address == "::" else (address,):
            try:
                socket.create_connection((own_address, self.port), CHECK_TIMEOUT_S).close()
            except OSError:  # nobody listens, or we have no descriptor left: clients fare no better
                continue
            return True
        return False

    def _pool_runs(self) -> bool:
        """Whether one of the handlers' threads is free, or becomes so in time."""
        ran = threading.Event()
        try:
            self._pool.submit(ran.set)
        except RuntimeError:  # shut down
            return False
        return ran.wait(CHECK_TIMEOUT_S)
