"""A small HTTP/1.1 server for pages that are ready in memory.

Standard library threads, because there are few routes and few clients (a scraper, probes, a puller, a browser), and
because it must not fall over:

* one thread per connection, at most ``max_connections``; when all are taken, the one that has waited longest for a
  request is closed in favour of the new one, so idle or dribbling clients cannot lock a scraper out;
* ``timeout_s`` bounds each wait for request bytes and the sending of a whole body (socket.sendall counts the sum), so a
  client that reads one byte a second costs one thread for that long and no more;
* what is answered stands in a table of routes (exporters/pages/routing.py).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from .routing import TEXT, Response, Routes, dispatch

MAX_CONNECTIONS = 32
TIMEOUT_S = 10.0


class HttpServer:
    """Serves a route table until stopped.

    Args:
        host: address to bind; a colon in it means IPv6.
        port: port to bind; 0 lets the kernel choose, see ``port``.
        routes: the route table.
        max_connections: most connections at once.
        timeout_s: longest wait for request bytes, and longest time to send one response.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        routes: Routes,
        *,
        max_connections: int = MAX_CONNECTIONS,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        handler = type("_BoundHandler", (_Handler,), {"routes": routes, "timeout": timeout_s})
        self._server = LimitedServer((host, port), handler, max_connections)
        self._thread: threading.Thread | None = None
        self._stopped = False

    @property
    def port(self) -> int:
        """The port that is really bound."""
        return int(self._server.server_address[1])

    @property
    def open_connections(self) -> int:
        """How many of the places are taken."""
        return self._server.connections.size()

    @property
    def closed_for_room(self) -> int:
        """Connections closed or refused so far because all places were taken."""
        return self._server.connections.closed_for_room

    def start(self) -> None:
        """Serve in a daemon thread."""
        self._thread = threading.Thread(target=self._server.serve, name="http", daemon=True)
        self._thread.start()

    def stop(self, grace_s: float = 1.0) -> None:
        """Stop listening, let responses under way finish, close what is idle; idempotent.

        Args:
            grace_s: how long a response may still take.
        """
        if self._stopped:
            return
        self._stopped = True
        if self._thread is not None:
            self._server.halt()
            self._thread.join()
        self._server.server_close()
        self._server.connections.close_all(grace_s)


class Connections:
    """Open connections; each waits for a request (with the time since) or answers one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._waiting: dict[socket.socket, float] = {}  # insertion order = order of waiting since
        self._busy: set[socket.socket] = set()
        self.closed_for_room = 0

    def size(self) -> int:
        """Places taken."""
        with self._changed:
            return len(self._waiting) + len(self._busy)

    def enter(self, connection: socket.socket) -> bool:
        """Take a place, if need be that of the longest waiting; False if all are answering."""
        with self._changed:
            if len(self._waiting) + len(self._busy) >= self._limit:
                self.closed_for_room += 1
                if not self._waiting:
                    return False
                _shut(next(iter(self._waiting)))
                del self._waiting[next(iter(self._waiting))]
            self._waiting[connection] = time.monotonic()
            return True

    def busy(self, connection: socket.socket) -> bool:
        """A request has come; False if the connection was closed in favour of another."""
        with self._changed:
            if self._waiting.pop(connection, None) is None:
                return False
            self._busy.add(connection)
            return True

    def idle(self, connection: socket.socket) -> None:
        """The response is out."""
        with self._changed:
            self._busy.discard(connection)
            self._waiting[connection] = time.monotonic()
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


class LimitedServer(ThreadingHTTPServer):
    """A thread per connection, and at most so many of them."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], limit: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.connections = Connections(limit)
        self._halted = False
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without the name lookup of the base class: it can block for seconds and is for CGI only."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def serve(self) -> None:
        """Accept until halted; asleep in between, where the base class would wake up to look for its end."""
        while not self._halted:
            self.handle_request()

    def halt(self) -> None:
        """End ``serve``: a listening socket that is shut wakes who waits for it."""
        self._halted = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 - the base class's signature
        """Whether there is a place."""
        return self.connections.enter(request)

    def shutdown_request(self, request: Any) -> None:
        """The end of a connection, whatever became of it."""
        self.connections.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is not worth a traceback."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "tracefit"
    sys_version = ""
    wbufsize = 0  # socket.sendall under every write; a buffered writer would start the timeout anew at each piece
    disable_nagle_algorithm = True
    error_content_type = TEXT
    error_message_format = "%(code)d %(message)s\n"
    routes: ClassVar[Routes] = ()
    server: LimitedServer

    def __getattr__(self, name: str) -> Any:
        # Every method goes through the table: the base class answers 501 to what it has no do_* for, but a known path
        # with a wrong method is 405 (RFC 9110 §15.5.6).
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)

    def _answer(self) -> None:
        if not self.server.connections.busy(self.connection):
            self.close_connection = True
            return
        try:
            if "content-length" in self.headers or "transfer-encoding" in self.headers:
                self.close_connection = self.headers.get("content-length") != "0"  # a body we shall not read follows
            response = dispatch(self.routes, self.command, self.path, self.headers)
            self._send(response)
        finally:
            self.server.connections.idle(self.connection)

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        if response.status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", response.content_type)
            self.send_header("Content-Length", str(len(response.body)))
        for name, value in response.headers:
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD" and response.status != HTTPStatus.NOT_MODIFIED:
            self.wfile.write(response.body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """No line per request; counters tell."""
