"""What a connection does with its requests: one method for all of them, answers with their length, no line per request.

Requests are read by the base class; between reading one and having answered it the connection counts as busy, so that
it does not give way to another one (collector/runtime/http/bounded_server.py).
"""

from __future__ import annotations

from collections.abc import Callable
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from .bounded_server import BoundedServer

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
