"""HTTP on aiohttp: a server with a bounded number of connections, and a client whose every answer is bounded.

Both run in the loop (collector/runtime/loop.py). The server closes a connection on which no whole request has come for
``timeout_s``. When all places are taken, the address that holds most of them gives one up for a newcomer, so that
neither silent nor busy clients lock out a scraper or a probe from another address. The client follows no redirect, asks
no proxy of the environment, keeps no cookie and unpacks nothing.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from collector.config import Endpoint

from .filesystem import cannot_listen
from .loop import IoLoop

CONNECTIONS_MAX = 32
"""Scrapers, probes and browsers together."""
LINGER_S = 1.0
"""How long the rest of a body that nobody reads is thrown away, so that the client reads why it was refused."""
HEADER_BYTES_MAX = 16 << 10
BACKLOG = 64
READ_BYTES = 1 << 16

_log = logging.getLogger(__name__)
_protocol_log = logging.getLogger(f"{__name__}.protocol")
_protocol_log.setLevel(logging.CRITICAL)
"""What clients send that is no HTTP is answered, and is no error of ours."""

Handle = Callable[[web.BaseRequest], Awaitable[web.Response]]
Respond = Callable[[str, str, Mapping[str, str]], tuple[int, str, bytes, tuple[tuple[str, str], ...]]]
"""(method, request target, headers) to status, content type, body, further headers."""


class _BoundedServer(web.Server):
    """Bounds the connections, and knows which of them answer a request."""

    def __init__(self, handle: Handle, connections_max: int, timeout_s: float) -> None:
        super().__init__(
            self._answer,
            access_log=None,
            keepalive_timeout=timeout_s,
            lingering_time=LINGER_S,
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
            read_bufsize=READ_BYTES,
            auto_decompress=False,
            logger=_protocol_log,
        )
        self._handle = handle
        self._connections_max = connections_max
        self._addresses: dict[asyncio.BaseTransport, str] = {}  # the one that has waited longest comes first
        self._busy: set[asyncio.BaseTransport] = set()

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        """Give it a place, if need be one of the address that holds most of them."""
        super().connection_made(handler, transport)
        for each in [each for each in self._addresses if each.is_closing()]:
            del self._addresses[each]
        self._addresses[transport] = (transport.get_extra_info("peername") or ("",))[0]
        if len(self._addresses) > self._connections_max:
            crowd = Counter(self._addresses.values()).most_common(1)[0][0]
            theirs = [each for each, address in self._addresses.items() if address == crowd]
            one = next((each for each in theirs if each not in self._busy), theirs[-1])
            del self._addresses[one]
            # at once, whatever it has not read; but its handler has to begin before it can end
            asyncio.get_running_loop().call_soon(cast("asyncio.Transport", one).abort)

    async def close(self, grace_s: float) -> None:
        """Close every connection, also one whose client does not read what it asked for."""
        self.pre_shutdown()
        await self.shutdown(grace_s)
        for each in self._addresses:
            cast("asyncio.Transport", each).abort()
        await asyncio.sleep(0)  # their sockets close in the next turn of the loop

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        transport = request.transport  # None when the client is gone already
        if transport is not None:
            self._busy.add(transport)
        try:
            response = await self._handle(request)
        except Exception:  # noqa: BLE001 -- a fault of ours, and no reason to close the port
            _log.exception("a request failed")
            response = web.Response(status=HTTPStatus.INTERNAL_SERVER_ERROR)
        finally:
            if transport is not None:
                self._busy.discard(transport)
            if transport in self._addresses:
                self._addresses[transport] = self._addresses.pop(transport)  # its wait begins anew
        response.headers["Server"] = "tracefit"
        return response


class HttpServer:
    """Serves one endpoint from ``start`` to ``stop``.

    Args:
        endpoint: where to listen; a colon in the address means IPv6, port 0 lets the kernel choose, see ``port``.
        handle: answers a request.
        purpose: what it serves, and the key of the endpoint, for the sentence that says that it cannot.
        timeout_s: how long a connection may take to send a request.
        connections_max: most connections at once.
        grace_s: how long a response may still take when the server stops.
        tls: None serves in the clear.
        io: the loop; None makes one of its own.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        handle: Handle,
        purpose: tuple[str, str],
        *,
        timeout_s: float,
        connections_max: int = CONNECTIONS_MAX,
        grace_s: float = 1.0,
        tls: ssl.SSLContext | None = None,
        io: IoLoop | None = None,
    ) -> None:
        self.port = 0
        self._endpoint = endpoint
        self._purpose = purpose
        self._grace_s = grace_s
        self._tls = tls
        self._io = io or IoLoop()
        self._own_io = io is None
        self._make_server = partial(_BoundedServer, handle, connections_max, timeout_s)
        self._serving: tuple[_BoundedServer, asyncio.Server] | None = None

    def start(self) -> None:
        """Bind and serve, or raise StartError."""
        self._io.run(self._start())

    def stop(self) -> bool:
        """No new connections, idle ones close, responses under way get ``grace_s``."""
        if self._serving is not None:
            self._io.run(self._stop(*self._serving))
            self._serving = None
        if self._own_io:
            self._io.close()
        return True

    async def _start(self) -> None:
        (address, port), server = self._endpoint, self._make_server()
        listen = asyncio.get_running_loop().create_server
        try:
            listener = await listen(server, address, port, ssl=self._tls, backlog=BACKLOG)
        except OSError as error:
            reason = (error.strerror or str(error)).rpartition(": ")[2]
            raise cannot_listen(self._endpoint, *self._purpose, reason) from None
        self.port = int(listener.sockets[0].getsockname()[1])
        self._serving = server, listener

    async def _stop(self, server: _BoundedServer, listener: asyncio.Server) -> None:
        """Accept nobody first, and close two turns of the loop later.

        Whom it accepts in the turn in which it closes, asyncio loses (python/cpython#109564, open).
        """
        for each in listener.sockets:
            asyncio.get_running_loop().remove_reader(each)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        listener.close()
        await server.close(self._grace_s)


def page_handler(respond: Respond) -> Handle:
    """Answer requests without a body.

    A page is made in a thread: rendering takes up to 20 ms, and exports that come meanwhile are acknowledged.
    """

    async def handle(request: web.BaseRequest) -> web.Response:
        status, content_type, body, headers = await asyncio.to_thread(
            respond, request.method, request.raw_path, request.headers
        )
        all_headers = CIMultiDict(headers)
        if status != HTTPStatus.NOT_MODIFIED:
            all_headers["Content-Type"] = content_type
        response = web.Response(status=status, body=body, headers=all_headers)
        if request.body_exists:
            response.force_close()  # a body nobody reads follows
        return response

    return handle


class FetchError(Exception):
    """No answer that is taken.

    Attributes:
        outcome: why: ``unreachable`` (nobody there, not in time, no TLS that is trusted, broken off), ``refused`` or
            ``unauthenticated`` (by its status), ``too_large``, or ``unexpected`` (no HTTP, or packed).
    """

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


_UNAUTHENTICATED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_PLAIN = "identity"


class HttpClient:
    """GETs over connections that are kept; used in the loop.

    Args:
        timeout_s: how long an exchange may take, from connecting to the last byte.
        tls: whom to trust where the scheme is ``https``; None trusts whom the system trusts.
    """

    def __init__(self, timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._timeout_s = timeout_s
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def get(self, url: str, bytes_max: int, *, accept: str, token: str = "", address: str = "") -> bytes:
        """The body of what is there.

        Args:
            url: what to ask for.
            bytes_max: most bytes of a body.
            accept: in which form.
            token: sent as ``Authorization: Bearer``, if there is one.
            address: dialled in the host's stead; the host's name goes into ``Host`` and the TLS handshake.

        Raises:
            FetchError: anything but an answer of 200.
        """
        headers = {"Accept": accept} | ({"Authorization": f"Bearer {token}"} if token else {})
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._get(url, bytes_max, address, headers)
        except (TimeoutError, OSError, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            raise FetchError("unreachable") from None
        except (aiohttp.ClientError, ValueError):
            raise FetchError("unexpected") from None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _get(self, url: str, bytes_max: int, address: str, headers: dict[str, str]) -> bytes:
        target, name = URL(url, encoded=True), None
        if address:
            headers["Host"] = urlsplit(url).netloc
            name = target.host if target.scheme == "https" else None
            target = target.with_host(address)
        async with self._open().get(target, headers=headers, server_hostname=name, allow_redirects=False) as response:
            if response.status != HTTPStatus.OK:
                raise FetchError("unauthenticated" if response.status in _UNAUTHENTICATED else "refused")
            if response.headers.get("Content-Encoding", _PLAIN) != _PLAIN:  # though nobody asked for it
                raise FetchError("unexpected")
            if (response.content_length or 0) > bytes_max:
                raise FetchError("too_large")
            try:
                await response.content.readexactly(bytes_max + 1)
            except asyncio.IncompleteReadError as whole:
                return whole.partial
            raise FetchError("too_large")

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=True if self._tls is None else self._tls),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None),
                headers={"User-Agent": "tracefit", "Accept-Encoding": _PLAIN},
            )
        return self._session
