"""Recorded pages of a server, and a server that answers as a test says."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.paths import DATA

RECORDED = DATA / "m1_pages" / "pages.jsonl.gz"


def recorded_pages() -> list[tuple[float, bytes]]:
    """Seconds since the first page, and the page."""
    entries = [json.loads(line) for line in gzip.decompress(RECORDED.read_bytes()).splitlines()]
    begin_ns = entries[0]["sent_mono_ns"]
    return [((e["sent_mono_ns"] - begin_ns) / 1e9, e["page"].encode() + b"\n") for e in entries]


class PageServer:
    """Serves whatever ``answer`` gives.

    ``answer(path, elapsed_s)`` -> (status, headers, body); body None: never answers, a list: piece by piece. ``asked``
    has paths and headers, ``bodies`` what was posted.
    """

    def __init__(self, answer, *, context=None):
        self.begin_s = time.monotonic()
        self.asked, self.bodies = [], []
        self._answer = answer
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1

            def do_GET(self):
                server.respond(self)

            do_POST = do_GET  # noqa: N815 -- as http.server calls it

            def setup(self):
                super().setup()
                self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, *_):
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def respond(self, handler):
        self.bodies.append(handler.rfile.read(int(handler.headers.get("Content-Length", 0))))
        self.asked.append((handler.path, handler.headers))
        status, headers, body = self._answer(handler.path, time.monotonic() - self.begin_s)
        if body is None:
            time.sleep(300)
            return
        handler.send_response(status)
        pieces = body if isinstance(body, list) else [body]
        for name, value in ({"Content-Length": str(sum(map(len, pieces)))} | headers).items():
            handler.send_header(name, value)
        handler.end_headers()
        try:
            for piece in pieces:
                handler.wfile.write(piece)
                handler.wfile.flush()
        except OSError:
            handler.close_connection = True

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/metrics"

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
