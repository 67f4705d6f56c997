"""One server's page over a connection that is kept: bounded in time and bytes, redirects refused.

A server may stand behind a name that has many addresses (a headless Service): then the address is dialled, and the
name goes into the Host header and the TLS handshake.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import urllib.parse
from collections.abc import Callable
from typing import NamedTuple

from collector.decode.pages import PAGE_BYTES_MAX
from collector.runtime import Clock
from collector.telemetry import ScrapeOutcome

_CHUNK_BYTES = 262_144
_OK = 200
_REDIRECTS = range(300, 400)
_UNAUTHENTICATED = (401, 403)
_ROOT_PATHS = ("", "/", "/metrics")
_ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4"

Connection = http.client.HTTPConnection


class ScrapeTarget(NamedTuple):
    """Where a page is; ``address`` is dialled in the host's stead, if there is one."""

    url: str
    address: str = ""

    @property
    def server(self) -> str:
        """The name under which its engines are known."""
        parts = urllib.parse.urlsplit(self.url)
        host = self.address or parts.hostname or ""
        port = f":{parts.port}" if parts.port is not None else ""
        path = parts.path if parts.path not in _ROOT_PATHS else ""
        return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{port}{path}"

    @property
    def base_url(self) -> str:
        """Where the server answers other questions; empty if that cannot be told from where its page is.

        A page at another path may be a proxy's, and a certificate is not of an address but of the name behind it.
        """
        parts = urllib.parse.urlsplit(self.url)
        known = parts.path in _ROOT_PATHS and not (self.address and parts.scheme == "https")
        return self.server if known else ""


class FetchedPage(NamedTuple):
    """A page and when it was asked for and had."""

    body: bytes
    unix_ns: int
    sent_mono_ns: int
    got_mono_ns: int


class PageClient:
    """Asks one server; one thread at a time."""

    def __init__(
        self,
        target: ScrapeTarget,
        *,
        timeout_s: float,
        clock: Clock,
        token: Callable[[], str],
        tls: ssl.SSLContext | None,
    ) -> None:
        parts = urllib.parse.urlsplit(target.url)
        self._target = target
        self._host, self._port, self._tls = parts.hostname or "", parts.port, tls if parts.scheme == "https" else None
        self._path = (parts.path if parts.path not in ("", "/") else "/metrics") + (
            f"?{parts.query}" if parts.query else ""
        )
        self._timeout_s = timeout_s
        self._clock = clock
        self._token = token
        self._connection: Connection | None = None

    def fetch(self) -> FetchedPage | ScrapeOutcome:
        """The page, or why there is none. A connection that the server closed meanwhile is opened once more."""
        kept = self._connection is not None
        found = self._attempt()
        if kept and found in (ScrapeOutcome.UNREACHABLE, ScrapeOutcome.UNEXPECTED):
            return self._attempt()
        return found

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _attempt(self) -> FetchedPage | ScrapeOutcome:
        try:
            found = self._ask()
        except TimeoutError:
            found = ScrapeOutcome.TIMEOUT
        except OSError:
            found = ScrapeOutcome.UNREACHABLE
        except (http.client.HTTPException, ValueError):
            found = ScrapeOutcome.UNEXPECTED
        if isinstance(found, ScrapeOutcome):
            self.close()
        return found

    def _ask(self) -> FetchedPage | ScrapeOutcome:
        connection = self._connection or self._connect()
        self._connection = connection
        headers = {"Accept": _ACCEPT}
        token = self._token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        unix_ns, sent_ns = self._clock.unix_nano(), self._clock.monotonic_ns()
        connection.request("GET", self._path, headers=headers)
        with connection.getresponse() as response:
            return self._take(response, unix_ns, sent_ns)

    def _take(self, response: http.client.HTTPResponse, unix_ns: int, sent_ns: int) -> FetchedPage | ScrapeOutcome:
        if response.status != _OK:
            if response.status in _UNAUTHENTICATED:
                return ScrapeOutcome.UNAUTHENTICATED
            return ScrapeOutcome.REDIRECT if response.status in _REDIRECTS else ScrapeOutcome.REFUSED
        body = self._read(response, sent_ns + int(self._timeout_s * 1e9))
        if isinstance(body, ScrapeOutcome):
            return body
        return FetchedPage(body, unix_ns, sent_ns, self._clock.monotonic_ns())

    def _read(self, response: http.client.HTTPResponse, deadline_ns: int) -> bytes | ScrapeOutcome:
        announced = response.length
        if announced is not None and announced > PAGE_BYTES_MAX:
            return ScrapeOutcome.TOO_LARGE
        chunks: list[bytes] = []
        size = 0
        while chunk := response.read1(_CHUNK_BYTES):
            chunks.append(chunk)
            size += len(chunk)
            if size > PAGE_BYTES_MAX:
                return ScrapeOutcome.TOO_LARGE
            if self._clock.monotonic_ns() > deadline_ns:  # a server that drips never trips the socket's own timeout
                return ScrapeOutcome.TIMEOUT
        if announced is not None and size < announced:
            return ScrapeOutcome.TRUNCATED
        return b"".join(chunks)

    def _connect(self) -> Connection:
        address = (self._target.address or self._host, self._port or (443 if self._tls else 80))
        raw = socket.create_connection(address, self._timeout_s)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.sock = raw if self._tls is None else self._tls.wrap_socket(raw, server_hostname=self._host)
        except BaseException:
            raw.close()
            raise
        return connection
