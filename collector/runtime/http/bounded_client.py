"""An HTTP/1.1 connection whose every exchange, head and body of the answer together, ends by a deadline.

A socket's own timeout begins anew with every byte, so that a server that drips a header keeps a thread for good; here
each wait is for what is left of the exchange. A server may stand behind a name that has many addresses (a headless
Service): then the address is dialled, and the name goes into the Host header and the TLS handshake. When the server
closes the connection, the next exchange opens another one in the same way.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING

from collector.runtime.clock import Clock

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
