"""HTTP/1.1 by the standard library, bounded in connections, bytes and time: server, handler, client.

An HTTP/1.1 connection whose every exchange, head and body of the answer together, ends by a deadline.

A socket's own timeout begins anew with every byte, so that a server that drips a header keeps a thread for good; here
each wait is for what is left of the exchange. A server may stand behind a name that has many addresses (a headless
Service): then the address is dialled, and the name goes into the Host header and the TLS handshake. When the server
closes the connection, the next exchange opens another one in the same way.

A small HTTP/1.1 server for few clients (exporters, a scraper, probes, a browser) that must not fall over.

Standard library threads, one per connection and at most ``max_connections``: when all are taken, the one that has
waited longest for a request is closed in favour of the new one, so idle or dribbling clients cannot lock a scraper out.
How long one may take to send a request or to read its answer is the handler's ``timeout`` (socket.sendall counts the
sum), so a client that reads one byte a second costs one thread for that long and no more.

What a connection does with its requests: one method for all of them, answers with their length, no line per request.

Requests are read by the base class; between reading one and having answered it the connection counts as busy, so that
it does not give way to another one (collector/runtime/http.py).
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Callable
from email.message import Message
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from collector.config import Endpoint

from .filesystem import StartError
from .tasks import Clock, Health, Task

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

LeftSeconds = Callable[[], float]
"""What is left of an exchange; TimeoutError when nothing is."""


class BoundedConnection(http.client.HTTPConnection):
    """Of one server: ``open``, then ``request`` and ``getresponse``; one thread at a time.

    Args:
        server: scheme, host and port of its address.
        timeout_s: how long an exchange may take; connecting to a name may take that for each of its addresses.
        clock: tells how much of it is left.
        tls: whom to trust where the scheme is ``https``; None trusts whom the system trusts.
        address: dialled in the host's stead.
    """

    def __init__(
        self,
        server: urllib.parse.SplitResult,
        *,
        timeout_s: float,
        clock: Clock,
        tls: ssl.SSLContext | None = None,
        address: str = "",
    ) -> None:
        secure = server.scheme == "https"
        self.default_port = 443 if secure else 80
        super().__init__(server.hostname or "", server.port or self.default_port, timeout=timeout_s)
        self._tls = (tls or ssl.create_default_context()) if secure else None
        self._address = address or self.host
        self._timeout_s = timeout_s
        self._clock = clock
        self._deadline_ns = 0

    def open(self) -> None:
        """Begin an exchange: its time runs from now. Connects, unless the connection was kept."""
        self._deadline_ns = self._clock.monotonic_ns() + int(self._timeout_s * 1e9)
        if self.sock is None:
            self.connect()

    def connect(self) -> None:
        """Connect; ``http.client`` would dial the name, and in the clear."""
        raw = socket.create_connection((self._address, self.port), self._left_s())
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.settimeout(self._left_s())
            secured = raw if self._tls is None else self._tls.wrap_socket(raw, server_hostname=self.host)
        except BaseException:
            raw.close()
            raise
        self.sock = _TimedSocket(secured, self._left_s)

    def _left_s(self) -> float:
        left_s = (self._deadline_ns - self._clock.monotonic_ns()) / 1e9
        if left_s <= 0.0:
            raise TimeoutError
        return left_s


class _TimedSocket:
    """As much of a socket as ``http.client`` asks for."""

    def __init__(self, sock: socket.socket, left_s: LeftSeconds) -> None:
        self._sock = sock
        self._left_s = left_s

    def sendall(self, data: ReadableBuffer) -> None:
        self._sock.settimeout(self._left_s())
        self._sock.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._sock, self._left_s))

    def close(self) -> None:
        self._sock.close()


class _TimedReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, left_s: LeftSeconds) -> None:
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)
        self._left_s = left_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        self._sock.settimeout(self._left_s())
        size = self._raw.readinto(buffer)
        self._left_s()  # what comes too late is none, however little was missing
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()


MAX_CONNECTIONS = 32


class HttpServer:
    """Serves one endpoint from ``start`` to ``stop``.

    Args:
        name: of its task, and in health.
        endpoint: where to listen; a colon in the address means IPv6, port 0 lets the kernel choose, see ``port``.
        handler: answers the requests of a connection.
        purpose: what it serves, for the sentence that says that it cannot.
        max_connections: most connections at once.
        grace_s: how long a response may still take when the server stops.
        tls: the context of a new connection; None serves in the clear.
        health: where to check in, at least every ``check_every_s``.
        is_well: see :class:`~collector.runtime.Task`.
        check_every_s: how long it sleeps in accept at most; None sleeps until somebody calls.
    """

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        handler: type[BaseHTTPRequestHandler],
        purpose: str,
        *,
        max_connections: int = MAX_CONNECTIONS,
        grace_s: float = 1.0,
        tls: Callable[[], ssl.SSLContext] | None = None,
        health: Health | None = None,
        is_well: Callable[[], bool] = lambda: True,
        check_every_s: float | None = None,
    ) -> None:
        self.port = 0
        self.connections = Connections(max_connections)
        self._endpoint = endpoint
        self._handler = handler
        self._purpose = purpose
        self._grace_s = grace_s
        self._tls = tls
        self._check_every_s = check_every_s
        self._server: BoundedServer | None = None
        self._make_task = partial(Task, name, health=health, is_well=is_well)
        self._task: Task | None = None

    def start(self) -> None:
        """Bind and serve, or raise StartError."""
        try:
            self._server = BoundedServer(self._endpoint, self._handler, self.connections, self._tls)
        except OSError as error:
            raise StartError(f"cannot listen on {self._endpoint} for {self._purpose}: {error.strerror}") from None
        self._server.timeout = self._check_every_s
        self.port = self._server.server_port
        self._task = self._make_task(self._server.accept)
        self._task.start()

    def stop(self) -> bool:
        """No new connections, idle ones close, responses under way get ``grace_s``."""
        if self._server is not None and self._task is not None:
            self._task.request_stop()
            self._server.shut()
            self._task.join()
            self._server.server_close()
            self.connections.close_all(self._grace_s)
            self._server = None
        return True


class Connections:
    """Open connections; each waits for a request or answers one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        """Guards everything below."""
        self._waiting: dict[socket.socket, None] = {}  # a set that knows who has waited longest
        self._busy: set[socket.socket] = set()
        self.closed_for_room = 0
        """Connections closed or refused so far because all places were taken."""

    def size(self) -> int:
        """How many connections are served now."""
        with self._changed:
            return len(self._waiting) + len(self._busy)

    def enter(self, connection: socket.socket) -> bool:
        """Take a place, if need be that of the longest waiting; False if all are answering."""
        with self._changed:
            if len(self._waiting) + len(self._busy) >= self._limit:
                self.closed_for_room += 1
                if not self._waiting:
                    return False
                longest_waiting = next(iter(self._waiting))
                _shut(longest_waiting)
                del self._waiting[longest_waiting]
            self._waiting[connection] = None
            return True

    def mark_busy(self, connection: socket.socket) -> bool:
        """A request has come; False if the connection was closed in favour of another."""
        with self._changed:
            if connection not in self._waiting:
                return False
            del self._waiting[connection]
            self._busy.add(connection)
            return True

    def mark_idle(self, connection: socket.socket) -> None:
        """The response is out."""
        with self._changed:
            self._busy.discard(connection)
            self._waiting[connection] = None
            self._changed.notify_all()

    def leave(self, connection: socket.socket) -> None:
        """The connection is over."""
        with self._changed:
            self._busy.discard(connection)
            self._waiting.pop(connection, None)
            self._changed.notify_all()

    def close_all(self, grace_s: float) -> None:
        """Close idle connections, wait for busy ones, close them too when ``grace_s`` is over."""
        with self._changed:
            for connection in self._waiting:
                _shut(connection)
            self._changed.wait_for(lambda: not self._busy, grace_s)
            for connection in (*self._busy, *self._waiting):
                _shut(connection)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class BoundedServer(ThreadingHTTPServer):
    """A thread per connection, and as many as ``connections`` lets in."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self,
        endpoint: Endpoint,
        handler: type[BaseHTTPRequestHandler],
        connections: Connections,
        tls: Callable[[], ssl.SSLContext] | None,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in endpoint.address else socket.AF_INET
        self.connections = connections
        self._tls = tls
        super().__init__((endpoint.address, endpoint.port), handler)

    def server_bind(self) -> None:
        """Bind without the name lookup of the base class: it can block for seconds and is for CGI only."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def accept(self) -> float:
        """Accept one connection, asleep until there is one; the base class would wake up to look for its end."""
        self.handle_request()
        return 0.0

    def shut(self) -> None:
        """Wake who waits in accept: a listening socket that is shut does."""
        _shut(self.socket)

    def get_request(self) -> tuple[Any, Any]:
        """Accept; a handshake is left to the connection's own thread, at its first read."""
        connection, address = super().get_request()
        if self._tls is not None:
            context = self._tls()
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 -- the base class's signature
        """Whether there is a place."""
        return self.connections.enter(request)

    def shutdown_request(self, request: Any) -> None:
        """The end of a connection, whatever became of it."""
        self.connections.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is not worth a traceback."""


Reply = tuple[int, str, bytes, tuple[tuple[str, str], ...]]
"""Status, content type, body, further headers; Content-Length and Date are the handler's business."""


class Handler(BaseHTTPRequestHandler):
    """Subclasses answer every request, of whichever method, in ``serve``."""

    protocol_version = "HTTP/1.1"
    server_version = "tracefit"
    sys_version = ""
    wbufsize = 0  # socket.sendall under every write; a buffered writer would start the timeout anew at each piece
    disable_nagle_algorithm = True
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"
    server: BoundedServer

    def serve(self) -> None:
        """Reply the request that was read."""
        raise NotImplementedError  # abstract: the base class is no ABC, and a Handler alone answers nothing

    def send_reply(self, reply: Reply) -> None:
        """Send a reply whole, without its body where HTTP wants none."""
        status, content_type, body, headers = reply
        self.send_response(status)
        has_body = status != HTTPStatus.NOT_MODIFIED
        if has_body:
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
        for name, value in headers:
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if has_body and self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- the base class's name
        """No line per request; counters tell."""

    def do_GET(self) -> None:
        """Every method that HTTP knows goes one way: a path that is not for it answers 405 (RFC 9110 §15.5.6)."""
        self.serve()

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = do_GET  # noqa: N815


def page_handler(respond: Callable[[str, str, Message], Reply], timeout_s: float) -> type[Handler]:
    """A handler of requests without a body.

    Args:
        respond: (method, request target, headers) to the answer; may not block.
        timeout_s: longest wait for request bytes, and longest time to send one response.
    """

    class _PageHandler(Handler):
        timeout = timeout_s

        def serve(self) -> None:
            if not self.server.connections.mark_busy(self.connection):
                self.close_connection = True
                return
            try:
                if "content-length" in self.headers or "transfer-encoding" in self.headers:
                    self.close_connection = self.headers.get("content-length") != "0"  # a body nobody reads follows
                self.send_reply(respond(self.command, self.path, self.headers))
            finally:
                self.server.connections.mark_idle(self.connection)

    return _PageHandler
