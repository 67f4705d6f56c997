"""OTLP/HTTP: POST /v1/traces with protobuf, plain or gzip, on standard library threads.

That server costs a third of any other we measured. What it lacks is here:

* a body is read piece by piece against a budget shared by all requests, so that a declared length costs nothing and the
  memory of all bodies together is bounded; a client has ``timeout_s`` for the whole of it;
* gzip is inflated against the same size limit as a plain body;
* a connection that waits for a request, or for the rest of one, gives way when all places are taken;
* no keep-alive after an answer that left a body unread.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from ssl import SSLContext
from typing import Any, ClassVar, Final, NamedTuple

import grpc

from collector.config import HttpReceiverConfig, parse_endpoint
from collector.receive.admission import Refused
from collector.receive.status import HttpAnswer, http_answer, rpc_status
from collector.runtime import StartError
from collector.telemetry import Outcome, Transport
from exporters.pages import LimitedServer

from .watch import CHECK_EVERY_S

PATH: Final = "/v1/traces"
CONTENT_TYPE: Final = "application/x-protobuf"
PIECE_BYTES: Final = 1 << 18
BODIES_BYTES_FACTOR: Final = 2
"""All bodies being read together may hold so many of the largest allowed."""
BUDGET_WAIT_S: Final = 2.0

Offer = Callable[[bytes, str, Transport, float | None], Refused | None]
TurnAway = Callable[[Transport, Outcome], None]
Accepts = Callable[[str | None], bool]

_log = logging.getLogger(__name__)


class Rejection(NamedTuple):
    """An answer without looking at telemetry."""

    outcome: Outcome
    status: HTTPStatus
    code: grpc.StatusCode
    text: str
    headers: tuple[tuple[str, str], ...] = ()


_CODE = grpc.StatusCode
NOT_FOUND = Rejection(Outcome.UNSUPPORTED, HTTPStatus.NOT_FOUND, _CODE.UNIMPLEMENTED, f"only {PATH} is served")
NOT_POST = Rejection(
    Outcome.UNSUPPORTED, HTTPStatus.METHOD_NOT_ALLOWED, _CODE.UNIMPLEMENTED, "POST only", (("Allow", "POST"),)
)
NOT_PROTOBUF = Rejection(
    Outcome.UNSUPPORTED,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    _CODE.INVALID_ARGUMENT,
    f"expected Content-Type {CONTENT_TYPE}, Content-Encoding gzip or none",
    (("Accept-Encoding", "gzip"),),
)
NO_TOKEN = Rejection(
    Outcome.UNAUTHENTICATED,
    HTTPStatus.UNAUTHORIZED,
    _CODE.UNAUTHENTICATED,
    "a bearer token is needed",
    (("WWW-Authenticate", "Bearer"),),
)
NO_LENGTH = Rejection(
    Outcome.UNSUPPORTED, HTTPStatus.LENGTH_REQUIRED, _CODE.INVALID_ARGUMENT, "expected a Content-Length"
)
TOO_LARGE = Rejection(
    Outcome.TOO_LARGE, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _CODE.RESOURCE_EXHAUSTED, "the body is too large"
)
TOO_SLOW = Rejection(Outcome.INCOMPLETE, HTTPStatus.REQUEST_TIMEOUT, _CODE.INVALID_ARGUMENT, "the body did not come")
NOT_GZIP = Rejection(Outcome.UNDECODABLE, HTTPStatus.BAD_REQUEST, _CODE.INVALID_ARGUMENT, "not gzip")
BUSY = Rejection(
    Outcome.QUEUE_FULL,
    HTTPStatus.SERVICE_UNAVAILABLE,
    _CODE.RESOURCE_EXHAUSTED,
    "too much being received",
    (("Retry-After", "1"),),
)


class Budget:
    """Bytes that all request bodies being read may hold together."""

    def __init__(self, capacity_bytes: int, wait_s: float = BUDGET_WAIT_S) -> None:
        self._left = capacity_bytes
        self._wait_s = wait_s
        self._room = threading.Condition()

    def take(self, size_bytes: int) -> bool:
        """Reserve, waiting for a while; False if there is no room."""
        with self._room:
            if not self._room.wait_for(lambda: self._left >= size_bytes, self._wait_s):
                return False
            self._left -= size_bytes
            return True

    def give_back(self, size_bytes: int) -> None:
        """Release what was reserved."""
        with self._room:
            self._left += size_bytes
            self._room.notify_all()


def inflate(data: bytes, limit_bytes: int) -> bytes | None:
    """Gunzip, also of several members; None beyond the limit. Raises zlib.error on bad data."""
    out: list[bytes] = []
    size = 0
    while data:
        member = zlib.decompressobj(wbits=31)
        piece = member.decompress(data, limit_bytes - size + 1)
        size += len(piece)
        if size > limit_bytes:
            return None
        if not member.eof:
            raise zlib.error("ends too soon")
        out.append(piece)
        data = member.unused_data
    return out[0] if len(out) == 1 else b"".join(out)


class _WayIn(NamedTuple):
    """What the handlers of one receiver share."""

    offer: Offer
    accepts: Accepts | None
    turn_away: TurnAway
    budget: Budget
    limit_bytes: int
    timeout_s: float


class OtlpHttpReceiver:
    """A server on one endpoint; ``start`` once, ``stop`` once."""

    def __init__(
        self,
        config: HttpReceiverConfig,
        offer: Offer,
        *,
        context: Callable[[], SSLContext] | None = None,
        accepts: Accepts | None = None,
        turn_away: TurnAway = lambda _transport, _outcome: None,
        check_in: Callable[[], None] = lambda: None,
    ) -> None:
        self._check_in = check_in
        self._config = config
        self._context = context
        limit_bytes = config.max_request_body_size_mib << 20
        budget = Budget(BODIES_BYTES_FACTOR * limit_bytes)
        way_in = _WayIn(offer, accepts, turn_away, budget, limit_bytes, config.timeout_s)
        self._handler = type("_BoundHandler", (_Handler,), {"way_in": way_in, "timeout": config.timeout_s})
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Bind and serve; the port taken."""
        endpoint = parse_endpoint(self._config.endpoint)
        try:
            self._server = _Server(endpoint, self._handler, self._config.max_connections, self._context, self._check_in)
        except OSError as error:
            raise StartError(f"cannot listen on {endpoint} for OTLP/HTTP: {error.strerror}") from None
        self._thread = threading.Thread(target=self._server.serve, name="otlp-http", daemon=True)
        self._thread.start()
        return int(self._server.server_address[1])

    def stop(self, grace_s: float) -> None:
        """No new connections, idle ones close, requests under way get ``grace_s``."""
        if self._server is None or self._thread is None:
            return
        self._server.halt()
        self._thread.join()
        self._server.server_close()
        self._server.connections.close_all(grace_s)
        self._server = None


class _Server(LimitedServer):
    def __init__(
        self,
        address: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
        limit: int,
        context: Callable[[], SSLContext] | None,
        check_in: Callable[[], None],
    ) -> None:
        self._context = context
        self._check_in = check_in
        self.timeout = CHECK_EVERY_S
        super().__init__(address, handler, limit)

    def handle_request(self) -> None:
        """One turn of accepting, a connection or not; who no longer takes turns has checked in for the last time."""
        self._check_in()
        super().handle_request()

    def get_request(self) -> tuple[Any, Any]:
        """Accept; the handshake is left to the connection's own thread, at its first read."""
        connection, address = super().get_request()
        if self._context is not None:
            context = self._context()
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "tracefit"
    sys_version = ""
    disable_nagle_algorithm = True
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"
    way_in: ClassVar[_WayIn]
    server: _Server

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # every method, as in exporters.http: a known path with a wrong one is 405
            return self._serve
        raise AttributeError(name)

    def _serve(self) -> None:
        rejection = self._look_at_head()
        if rejection is not None:
            self._reject(rejection)
            return
        held = [0]
        try:
            body = self._body(held)
            if isinstance(body, Rejection):
                self._reject(body)
            elif self.server.connections.busy(self.connection):
                try:
                    self._export(body)
                finally:
                    self.server.connections.idle(self.connection)
            else:
                self.close_connection = True
        finally:
            self.way_in.budget.give_back(held[0])

    def _look_at_head(self) -> Rejection | None:
        headers = self.headers
        if self.path.partition("?")[0] != PATH:
            return NOT_FOUND
        if self.command != "POST":
            return NOT_POST
        if self.way_in.accepts is not None and not self.way_in.accepts(headers.get("Authorization")):
            return NO_TOKEN
        if headers.get_content_type() != CONTENT_TYPE or _encoding(headers) not in ("", "identity", "gzip"):
            return NOT_PROTOBUF
        length = headers.get("Content-Length", "")
        if "Transfer-Encoding" in headers or not (length.isascii() and length.isdigit()):
            return NO_LENGTH
        return TOO_LARGE if len(length) > 12 or int(length) > self.way_in.limit_bytes else None  # noqa: PLR2004 -- digits

    def _body(self, held: list[int]) -> bytes | Rejection:
        """Read the body; ``held`` tells what was taken from the budget, also if this raises."""
        left = int(self.headers["Content-Length"])
        until_s = time.monotonic() + self.way_in.timeout_s
        pieces: list[bytes] = []
        while left:
            size = min(left, PIECE_BYTES)
            piece_at = 0
            if not self.way_in.budget.take(size):
                return BUSY
            held[0] += size
            while piece_at < size:
                patience_s = until_s - time.monotonic()
                if patience_s <= 0:
                    return TOO_SLOW
                self.connection.settimeout(patience_s)
                try:
                    piece = self.rfile.read1(size - piece_at)
                except TimeoutError:
                    return TOO_SLOW
                if not piece:
                    return TOO_SLOW
                pieces.append(piece)
                piece_at += len(piece)
            left -= size
        self.connection.settimeout(self.way_in.timeout_s)
        body = b"".join(pieces)
        return self._inflate(body, held) if _encoding(self.headers) == "gzip" else body

    def _inflate(self, body: bytes, held: list[int]) -> bytes | Rejection:
        budget, limit_bytes = self.way_in.budget, self.way_in.limit_bytes
        if not budget.take(limit_bytes):  # the size is not known before
            return BUSY
        held[0] += limit_bytes
        try:
            out = inflate(body, limit_bytes)
        except zlib.error:
            return NOT_GZIP
        if out is None:
            return TOO_LARGE
        budget.give_back(held[0] - len(out))
        held[0] = len(out)
        return out

    def _export(self, payload: bytes) -> None:
        peer = f"http:{self.client_address[0]}:{self.client_address[1]}"
        try:
            refused = self.way_in.offer(payload, peer, Transport.HTTP, None)
        except Exception:  # noqa: BLE001 -- its text would reach the client
            _log.exception("export failed")
            self._send(HttpAnswer(HTTPStatus.INTERNAL_SERVER_ERROR, rpc_status(_CODE.INTERNAL, "internal error")))
            return
        self._send(HttpAnswer(HTTPStatus.OK, b"") if refused is None else http_answer(refused))

    def _reject(self, rejection: Rejection) -> None:
        self.way_in.turn_away(Transport.HTTP, rejection.outcome)
        self.close_connection = True  # what is left of the body shall not be taken for a request
        self._send(HttpAnswer(rejection.status, rpc_status(rejection.code, rejection.text)), rejection.headers)

    def _send(self, answer: HttpAnswer, headers: tuple[tuple[str, str], ...] = ()) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(answer.body)))
        if answer.retry_after_s:
            self.send_header("Retry-After", str(answer.retry_after_s))
        for name, value in headers:
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- the base class's name
        """No line per request; counters tell."""


def _encoding(headers: Any) -> str:
    return (headers.get("Content-Encoding") or "").strip().lower()
