"""One server's page over a connection that is kept: bounded in time and bytes, redirects refused."""

from __future__ import annotations

import http.client
import ssl
import urllib.parse
from collections.abc import Callable
from typing import NamedTuple

from collector.decode.pages import PAGE_BYTES_MAX
from collector.runtime import Clock
from collector.runtime.http import BoundedConnection
from collector.telemetry import ScrapeOutcome

_CHUNK_BYTES = 262_144
_OK = 200
_REDIRECTS = range(300, 400)
_UNAUTHENTICATED = (401, 403)
_PLAIN = "identity"
_ROOT_PATHS = ("", "/", "/metrics", "/metrics/")
_ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4"


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
        self._path = (parts.path if parts.path not in ("", "/") else "/metrics") + (
            f"?{parts.query}" if parts.query else ""
        )
        self._clock = clock
        self._token = token
        self._connection = BoundedConnection(parts, timeout_s=timeout_s, clock=clock, tls=tls, address=target.address)

    def fetch(self) -> FetchedPage | ScrapeOutcome:
        """The page, or why there is none. A connection that the server closed meanwhile is opened once more."""
        kept = self._connection.sock is not None
        found = self._attempt()
        if kept and found in (ScrapeOutcome.UNREACHABLE, ScrapeOutcome.UNEXPECTED):
            return self._attempt()
        return found

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        self._connection.close()

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
        headers = {"Accept": _ACCEPT}
        token = self._token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._connection.open()
        unix_ns, sent_ns = self._clock.unix_nano(), self._clock.monotonic_ns()
        self._connection.request("GET", self._path, headers=headers)
        with self._connection.getresponse() as response:
            return self._take(response, unix_ns, sent_ns)

    def _take(self, response: http.client.HTTPResponse, unix_ns: int, sent_ns: int) -> FetchedPage | ScrapeOutcome:
        if response.status != _OK:
            if response.status in _UNAUTHENTICATED:
                return ScrapeOutcome.UNAUTHENTICATED
            return ScrapeOutcome.REDIRECT if response.status in _REDIRECTS else ScrapeOutcome.REFUSED
        if response.headers.get("Content-Encoding", _PLAIN) != _PLAIN:  # packed, though nobody asked for it
            return ScrapeOutcome.UNEXPECTED
        body = self._read(response)
        if isinstance(body, ScrapeOutcome):
            return body
        return FetchedPage(body, unix_ns, sent_ns, self._clock.monotonic_ns())

    @staticmethod
    def _read(response: http.client.HTTPResponse) -> bytes | ScrapeOutcome:
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
        if announced is not None and size < announced:
            return ScrapeOutcome.TRUNCATED
        return b"".join(chunks)
