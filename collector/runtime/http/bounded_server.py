"""A small HTTP/1.1 server for few clients (exporters, a scraper, probes, a browser) that must not fall over.

Standard library threads, one per connection and at most ``max_connections``: when all are taken, the one that has
waited longest for a request is closed in favour of the new one, so idle or dribbling clients cannot lock a scraper out.
How long one may take to send a request or to read its answer is the handler's ``timeout`` (socket.sendall counts the
sum), so a client that reads one byte a second costs one thread for that long and no more.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from collector.config import Endpoint
from collector.runtime.exits import StartError
from collector.runtime.health import Health
from collector.runtime.tasks import Task

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
