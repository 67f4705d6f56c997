"""OTLP/HTTP: POST /v1/traces with protobuf or JSON, plain or gzip, on standard library threads.

The standard library's server costs a third of any other we measured. What it lacks is here:

* a body is read piece by piece against a budget shared by all requests, so that a declared length costs nothing and the
  memory of all bodies together is bounded; a client has ``TIMEOUT_S`` for the whole of it, and ``STALLED_S`` while
  others wait for room;
* gzip is inflated against the same size limit as a plain body, piece by piece, within the same time; it ends when the
  client leaves, and a body may have ``MEMBERS_MAX`` members;
* JSON becomes protobuf before anything else looks at it; its objects are counted before they are made;
* a connection that waits for a request, or for the rest of one, gives way when all places are taken;
* no keep-alive after an answer that left a body unread.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import ssl
import threading
import zlib
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar, Final, NamedTuple

import grpc

from collector.config import HttpReceiverConfig, parse_endpoint
from collector.decode import TooManyObjects, json_to_protobuf
from collector.ingest.intake import FIELDS_MAX
from collector.ingest.status import HttpAnswer, http_answer
from collector.runtime import Clock, Health
from collector.runtime.http import Handler, HttpServer
from collector.telemetry import Outcome

from .way_in import CHECK_EVERY_S, WayIn

NAME: Final = "http-receiver"
PATH: Final = "/v1/traces"
CONTENT_TYPE: Final = "application/x-protobuf"
JSON: Final = "application/json"
PIECE_BYTES: Final = 1 << 18
BODIES_BYTES_FACTOR: Final = 2
"""All bodies being read together may hold so many of the largest allowed."""
CONNECTIONS_MAX: Final = 64
"""Connections open at once; the one that has waited longest for a request makes room for a newcomer."""
TIMEOUT_S: Final = 10.0
"""How long a request may take to come: the deadline of an SDK's exporter."""
BUDGET_WAIT_S: Final = 2.0
STALLED_S: Final = 1.0
"""When others wait for room, a body that began so long ago and is not here gives way."""
LOOK_EVERY_S: Final = 0.25
MEMBERS_MAX: Final = 64
"""Exporters make one member; who joins gzip files makes a few. An empty member has 20 bytes."""

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
NOT_OTLP = Rejection(
    Outcome.UNSUPPORTED,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    _CODE.INVALID_ARGUMENT,
    f"expected Content-Type {CONTENT_TYPE} or {JSON}, Content-Encoding gzip or none",
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
TOO_MANY_MEMBERS = Rejection(
    Outcome.UNDECODABLE,
    HTTPStatus.BAD_REQUEST,
    _CODE.INVALID_ARGUMENT,
    f"more than {MEMBERS_MAX} gzip members in one body",
)
NOT_JSON = Rejection(Outcome.UNDECODABLE, HTTPStatus.BAD_REQUEST, _CODE.INVALID_ARGUMENT, "not OTLP/JSON")
TOO_MANY_OBJECTS = Rejection(
    Outcome.TOO_MANY_FIELDS, HTTPStatus.BAD_REQUEST, _CODE.INVALID_ARGUMENT, "too many objects in one export"
)
BUSY = Rejection(
    Outcome.QUEUE_FULL,
    HTTPStatus.SERVICE_UNAVAILABLE,
    _CODE.RESOURCE_EXHAUSTED,
    "too much being received",
    (("Retry-After", "1"),),
)


class Budget:
    """Bytes that all request bodies being read may hold together.

    While one waits for room, the connection whose body began longest ago is shut, if that is ``STALLED_S`` ago: who
    declares a large body and sends it slowly keeps nobody out.
    """

    def __init__(self, capacity_bytes: int, clock: Clock, wait_s: float = BUDGET_WAIT_S) -> None:
        self._left = capacity_bytes
        self._clock = clock
        self._wait_s = wait_s
        self._room = threading.Condition()
        """Guards everything but the settings."""
        self._coming: dict[socket.socket, int] = {}  # when each body began, the oldest first

    def begin(self, connection: socket.socket, now_ns: int) -> None:
        """A body begins to come."""
        with self._room:
            self._coming[connection] = now_ns

    def end(self, connection: socket.socket) -> None:
        """It is here, or will not come."""
        with self._room:
            self._coming.pop(connection, None)

    def take(self, size_bytes: int) -> bool:
        """Reserve, waiting for a while; False if there is no room."""
        with self._room:
            if self._left < size_bytes and not self._await_room(size_bytes):
                return False
            self._left -= size_bytes
            return True

    def give_back(self, size_bytes: int) -> None:
        """Release what was reserved."""
        with self._room:
            self._left += size_bytes
            self._room.notify_all()

    def _await_room(self, size_bytes: int) -> bool:
        begun_ns = now_ns = self._clock.monotonic_ns()
        while self._left < size_bytes and now_ns - begun_ns < self._wait_s * 1e9:
            self._shut_stalled(now_ns)
            self._room.wait(LOOK_EVERY_S)
            now_ns = self._clock.monotonic_ns()
        return self._left >= size_bytes

    def _shut_stalled(self, now_ns: int) -> None:
        oldest = next(iter(self._coming), None)
        if oldest is not None and now_ns - self._coming[oldest] >= STALLED_S * 1e9:
            del self._coming[oldest]
            with contextlib.suppress(OSError):
                # not an SSLSocket's own, which would take its TLS away from the thread that reads
                socket.socket.shutdown(oldest, socket.SHUT_RDWR)


class TooManyMembers(Exception):
    """A gzip body of more members than anybody makes."""


def inflate(data: bytes, limit_bytes: int, check: Callable[[], None] = lambda: None) -> bytes | None:
    """Gunzip, also of several members; None beyond the limit.

    The work is bounded by the sizes and by ``MEMBERS_MAX``: what follows a member is not copied as a whole.

    Args:
        data: the body.
        limit_bytes: most bytes that may come out.
        check: called before each piece of the body; what it raises ends the work.

    Raises:
        zlib.error: the data is bad.
        TooManyMembers: the rest of the body was not looked at.
    """
    view = memoryview(data)
    out: list[bytes] = []
    at = size = members = 0
    while at < len(view):
        if members == MEMBERS_MAX:
            raise TooManyMembers
        members += 1
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            check()
            piece = view[at : at + PIECE_BYTES]
            if not piece:
                raise zlib.error("ends too soon")
            out.append(member.decompress(piece, limit_bytes - size + 1))
            size += len(out[-1])
            if size > limit_bytes:
                return None
            at += len(piece) - len(member.unused_data)
    return out[0] if len(out) == 1 else b"".join(out)


_NOT_INFLATED: Final[dict[type[Exception], Rejection]] = {
    zlib.error: NOT_GZIP,
    TooManyMembers: TOO_MANY_MEMBERS,
    TimeoutError: BUSY,
    ConnectionError: TOO_SLOW,
}


def make_http_receiver(
    config: HttpReceiverConfig,
    way_in: WayIn,
    *,
    health: Health,
    clock: Clock,
    grace_s: float,
    tls: Callable[[], ssl.SSLContext] | None = None,
) -> HttpServer:
    """A receiver on one endpoint, with a budget of its own."""
    limit_bytes = config.max_request_body_size_mib << 20
    shared = {
        "way_in": way_in,
        "clock": clock,
        "budget": Budget(BODIES_BYTES_FACTOR * limit_bytes, clock),
        "limit_bytes": limit_bytes,
        "timeout": TIMEOUT_S,
    }
    return HttpServer(
        NAME,
        parse_endpoint(config.endpoint),
        type("_BoundHandler", (_ExportHandler,), shared),
        "OTLP/HTTP",
        max_connections=CONNECTIONS_MAX,
        grace_s=grace_s,
        tls=tls,
        health=health,
        is_well=way_in.flows,
        check_every_s=CHECK_EVERY_S,
    )


class _ExportHandler(Handler):
    way_in: ClassVar[WayIn]
    clock: ClassVar[Clock]
    budget: ClassVar[Budget]
    limit_bytes: ClassVar[int]
    timeout: ClassVar[float]

    def serve(self) -> None:
        """Look at the head, read the body against the budget, hand it on."""
        rejection = self._check_head()
        if rejection is not None:
            self._reject(rejection)
            return
        held = [0]
        try:
            try:
                body = self._read_body(held)
            finally:
                self.budget.end(self.connection)
            if isinstance(body, Rejection):
                self._reject(body)
            elif self.server.connections.mark_busy(self.connection):
                try:
                    self._export(body)
                finally:
                    self.server.connections.mark_idle(self.connection)
            else:
                self.close_connection = True
        finally:
            self.budget.give_back(held[0])

    def _check_head(self) -> Rejection | None:
        headers = self.headers
        if self.path.partition("?")[0] != PATH:
            return NOT_FOUND
        if self.command != "POST":
            return NOT_POST
        if not self.way_in.admits(headers.get("Authorization")):
            return NO_TOKEN
        if headers.get_content_type() not in (CONTENT_TYPE, JSON) or _encoding(headers) not in ("", "identity", "gzip"):
            return NOT_OTLP
        length = headers.get("Content-Length", "")
        if "Transfer-Encoding" in headers or not (length.isascii() and length.isdigit()):
            return NO_LENGTH
        return TOO_LARGE if len(length) > 12 or int(length) > self.limit_bytes else None  # noqa: PLR2004 -- digits

    def _read_body(self, held: list[int]) -> bytes | Rejection:
        """Read the body; ``held`` tells what was taken from the budget, also if this raises."""
        left = int(self.headers["Content-Length"])
        until_ns = self.clock.monotonic_ns() + int(self.timeout * 1e9)
        pieces: list[bytes] = []
        while left:
            size = min(left, PIECE_BYTES)
            piece_at = 0
            if not self.budget.take(size):
                return BUSY
            held[0] += size
            while piece_at < size:
                now_ns = self.clock.monotonic_ns()
                if not pieces:  # who waits for its first room holds none
                    self.budget.begin(self.connection, now_ns)
                patience_s = (until_ns - now_ns) / 1e9
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
        self.budget.end(self.connection)
        self.connection.settimeout(self.timeout)
        body = b"".join(pieces)
        return self._inflate(body, held, until_ns) if _encoding(self.headers) == "gzip" else body

    def _inflate(self, body: bytes, held: list[int], until_ns: int) -> bytes | Rejection:
        budget, limit_bytes = self.budget, self.limit_bytes
        if not budget.take(limit_bytes):  # the size is not known before
            return BUSY
        held[0] += limit_bytes
        connection = select.poll()
        # a reset is told unasked; an end of the client's own data is not one: it may still wait for its answer
        connection.register(self.connection, 0)

        def check() -> None:
            if connection.poll(0):
                raise ConnectionError
            if self.clock.monotonic_ns() > until_ns:
                raise TimeoutError

        try:
            out = inflate(body, limit_bytes, check)
        except tuple(_NOT_INFLATED) as error:
            return _NOT_INFLATED[type(error)]
        if out is None:
            return TOO_LARGE
        budget.give_back(held[0] - len(out))
        held[0] = len(out)
        return out

    def _export(self, body: bytes) -> None:
        peer = f"http:{self.client_address[0]}:{self.client_address[1]}"
        try:
            payload = json_to_protobuf(body, FIELDS_MAX) if self._speaks_json() else body
        except TooManyObjects:
            self._reject(TOO_MANY_OBJECTS)
            return
        except ValueError:
            self._reject(NOT_JSON)
            return
        try:
            refused = self.way_in.offer(payload, peer)
        except Exception:  # noqa: BLE001 -- its text would reach the client
            _log.exception("export failed")
            self._send(HttpAnswer(HTTPStatus.INTERNAL_SERVER_ERROR, _CODE.INTERNAL, "internal error"))
            return
        self._send(HttpAnswer(HTTPStatus.OK, _CODE.OK) if refused is None else http_answer(refused))

    def _speaks_json(self) -> bool:
        return self.headers.get_content_type() == JSON

    def _reject(self, rejection: Rejection) -> None:
        self.way_in.turn_away(rejection.outcome)
        self.close_connection = True  # what is left of the body shall not be taken for a request
        self._send(HttpAnswer(rejection.status, rejection.code, rejection.text), rejection.headers)

    def _send(self, answer: HttpAnswer, headers: tuple[tuple[str, str], ...] = ()) -> None:
        if answer.retry_after_s:
            headers = (*headers, ("Retry-After", str(answer.retry_after_s)))
        as_json = self._speaks_json()
        self.send_reply((answer.status, JSON if as_json else CONTENT_TYPE, answer.body(as_json=as_json), headers))


def _encoding(headers: Any) -> str:
    return (headers.get("Content-Encoding") or "").strip().lower()
