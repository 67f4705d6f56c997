"""HTTP on aiohttp: a server with a bounded number of connections, and a client whose every answer is bounded.

Both run in the loop. The server closes a connection on which no whole request has come for
``REQUEST_TIMEOUT_S``. When all places are taken, the address that holds most of them gives one up for each newcomer, so
that clients which are silent, send half a request or read no answer lock nobody out. The client follows no redirect,
asks no proxy of the environment, keeps no cookie and unpacks nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, BinaryIO, cast

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from multidict import CIMultiDict
from yarl import URL

from collector.config import Endpoint

from .filesystem import cannot_listen, sentence
from .loop import end_tasks, in_own_thread

CONNECTIONS_MAX = 64
"""Of one server, open at once; the one that waits longest for its client makes room for a newcomer."""
LINGER_S = 1.0
"""How long the rest of an unread body is discarded, so that the client can read the refusal."""
HEADER_BYTES_MAX = 16 << 10
BACKLOG = 1024
HANDSHAKE_S = 2.5
SEND_S, ANSWER_S = 0.03, 0.25
"""How long one that came keeps its place when all are taken, and how long one that is being answered."""
REQUEST_TIMEOUT_S = 10.0
"""How long a connection may take to send a request."""
READ_BYTES = 1 << 16
RECEIVE_BYTES = 1 << 14
"""What the kernel holds of an answer, and nearly what is read at once. Its pieces are parsed before others have the
loop again, and a flood of ``100 Continue`` or of one-byte chunks has very many."""

_log = logging.getLogger(__name__)
_protocol_log = logging.getLogger(f"{__name__}.protocol")
_protocol_log.setLevel(logging.CRITICAL)
"""Bytes that are not HTTP are answered, and are not logged as an error of ours."""

Handle = Callable[[web.BaseRequest], Awaitable[web.Response]]
Respond = Callable[[str, str, Mapping[str, str]], tuple[int, str, bytes, tuple[tuple[str, str], ...]]]
"""(method, request target, headers) to status, content type, body, further headers."""


class _Connection(web.RequestHandler):
    """From when it was accepted, TLS handshake included, to its end."""

    __slots__ = ("address", "ended", "request", "serving", "since_s")

    def __init__(self, server: web.Server, address: str, **options: Any) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, **options)
        self.address = address
        self.since_s = loop.time()
        """When it came, was answered last, or began to send what it asks."""
        self.request: web.BaseRequest | None = None
        self.ended = asyncio.Event()
        self.serving: asyncio.Task[None]
        """Lasts as long as it does; to cancel that ends it at once, whatever its client has not read."""

    @property
    def is_answered(self) -> bool:
        """Whether a whole request has come, and the answer is being made: its client is not what it waits for."""
        return self.request is not None and self.request.content.is_eof()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Mark the connection as ended."""
        super().connection_lost(exc)
        self.ended.set()


class HttpServer:
    """Serves one endpoint from ``start`` to ``stop``.

    The connections are bounded, from before their handshakes on. Where all places are taken, the address that holds
    most gives up its connection that waits longest for its client, and a connection is closed behind its next answer.
    One that has just come keeps its place for ``SEND_S``, one that is being answered for ``ANSWER_S``.

    Args:
        endpoint: where to listen; a colon in the address means IPv6, port 0 lets the kernel choose, see ``port``.
        handle: answers a request.
        purpose: what it serves, and the key of the endpoint, for the sentence that says that it cannot.
        stop_timeout_s: how long a response may still take when the server stops.
        tls: None serves in the clear.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        handle: Handle,
        purpose: tuple[str, str],
        *,
        stop_timeout_s: float = 1.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.port = 0
        self._endpoint = endpoint
        self._handle = handle
        self._purpose = purpose
        self._stop_timeout_s = stop_timeout_s
        self._tls = tls
        self._options: dict[str, Any] = {
            "access_log": None,
            "keepalive_timeout": REQUEST_TIMEOUT_S,
            "lingering_time": LINGER_S,
            "max_line_size": HEADER_BYTES_MAX,
            "max_field_size": HEADER_BYTES_MAX,
            "read_bufsize": READ_BYTES,
            "auto_decompress": False,
            "logger": _protocol_log,
        }
        self._server: web.Server | None = None
        self._accepting: list[asyncio.Task[None]] = []
        self._places: set[_Connection] = set()

    async def start(self) -> None:
        """Bind and serve, or raise StartError."""
        address, port = self._endpoint
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
        except OSError as error:
            reason = str(error.strerror).partition(" (")[0]
            raise cannot_listen(self._endpoint, *self._purpose, reason) from None
        listener.setblocking(False)
        self.port = int(listener.getsockname()[1])
        self._server = web.Server(self._answer)
        self._accepting = [asyncio.create_task(self._accept(listener, self._server))]

    async def stop(self) -> bool:
        """No new connections, idle ones close, responses under way get ``stop_timeout_s``.

        Then every connection is closed, also one whose client does not read what it asked for.
        """
        await end_tasks(self._accepting)
        if self._server is not None:
            self._server.pre_shutdown()
            await self._server.shutdown(self._stop_timeout_s)
        await end_tasks([each.serving for each in self._places])
        return True

    async def _accept(self, listener: socket.socket, server: web.Server) -> None:
        """Serve who comes, until it is cancelled.

        The call that accepts does not wait: one that is cancelled while it waits may lose whom it has accepted.
        """
        with listener:
            while True:
                await _until_readable(listener)
                await self._make_room()
                try:
                    newcomer, (address, *_) = listener.accept()
                except BlockingIOError:  # it has gone
                    continue
                except OSError as error:
                    _log.warning("nobody can connect: %s", error.strerror)
                    await asyncio.sleep(1.0)  # too many open files: some are closed meanwhile
                    continue
                newcomer.setblocking(False)
                place = _Connection(server, address, **self._options)
                place.serving = asyncio.create_task(self._serve(place, newcomer))
                self._places.add(place)

    async def _serve(self, place: _Connection, newcomer: socket.socket) -> None:
        """Serve one connection from its handshake to its end."""
        loop, timeout_s = asyncio.get_running_loop(), None if self._tls is None else HANDSHAKE_S
        try:
            await loop.connect_accepted_socket(lambda: place, newcomer, ssl=self._tls, ssl_handshake_timeout=timeout_s)
            await place.ended.wait()
        except OSError:
            pass  # no handshake
        finally:
            self._places.discard(place)
            del place.serving  # they refer to each other, and with TLS a connection has buffers of 256 KiB
            if place.transport is not None:
                place.transport.abort()
            else:
                newcomer.close()

    async def _make_room(self) -> None:
        while len(self._places) >= CONNECTIONS_MAX:
            held = Counter(each.address for each in self._places)
            one = min(self._places, key=lambda each: (-held[each.address], each.is_answered, each.since_s))
            may_end_s = one.since_s + (ANSWER_S if one.is_answered else SEND_S)
            wait_s = may_end_s - asyncio.get_running_loop().time()
            if wait_s > 0.0:  # until then another one may end
                serving = [each.serving for each in self._places]
                await asyncio.wait(serving, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                continue
            self._places.discard(one)
            one.serving.cancel()
            _log.warning("all %d connections are taken: those of %s give way", CONNECTIONS_MAX, one.address)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        place = cast("_Connection", request.protocol)
        now_s = asyncio.get_running_loop().time
        place.request, place.since_s = request, now_s()
        try:
            response = await self._handle(request)
        except Exception:  # noqa: BLE001 -- a fault of ours, and no reason to close the port
            _log.exception("a request failed")
            response = web.Response(status=HTTPStatus.INTERNAL_SERVER_ERROR)
        finally:
            place.request, place.since_s = None, now_s()
        response.headers["Server"] = "tracefit"
        if len(self._places) >= CONNECTIONS_MAX:
            response.force_close()
        return response


async def _until_readable(listener: socket.socket) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(listener)


def make_page_server(endpoint: Endpoint, respond: Respond) -> HttpServer:
    """A server of pages, which answers requests without a body.

    A page is made in a thread, and exports that come meanwhile are acknowledged.
    """

    async def handle(request: web.BaseRequest) -> web.Response:
        asked = request.method, request.raw_path, request.headers
        status, content_type, body, headers = await asyncio.to_thread(respond, *asked)
        response = web.Response(
            status=status, body=body, headers=CIMultiDict([*headers, ("Content-Type", content_type)])
        )
        if request.body_exists:
            response.force_close()  # a body nobody reads follows
        return response

    return HttpServer(endpoint, handle, ("the pages", "pages"))


class FetchError(Exception):
    """No usable answer; the text says what came instead.

    Attributes:
        outcome: why: ``unreachable`` (nobody there, not in time, no TLS that is trusted, broken off), ``refused`` or
            ``unauthenticated`` (by its status), ``too_large``, or ``unexpected`` (no HTTP, or packed).
        status: that of the answer, 0 where none came.
    """

    def __init__(self, outcome: str, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.outcome = outcome
        self.status = status


_UNAUTHENTICATED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_PLAIN = "identity"


class ThreadPerLookup(AbstractResolver):
    """Looks each name up in a thread of its own; a session looks up each once at a time."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """All addresses of a name; OSError if it has none."""
        look_up = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            ResolveResult(hostname=host, host=str(at[0]), port=int(at[1]), family=kind, proto=proto, flags=numeric)
            for kind, _, proto, _, at in await in_own_thread(look_up)
        ]

    async def close(self) -> None:
        """Nothing is held."""


def open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that receives ``RECEIVE_BYTES`` at a time."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    return made


def open_session(tls: ssl.SSLContext | bool, headers: Mapping[str, str], timeout_s: float) -> aiohttp.ClientSession:
    """For calls with these headers, each of which may take so long in all; made in the loop."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=tls, limit=0, resolver=ThreadPerLookup(), socket_factory=open_socket),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers=headers,
    )


class HttpClient:
    """GETs over connections that are kept, as many at once as are asked for; used in the loop.

    Args:
        timeout_s: how long an exchange may take, from connecting to the last byte.
        tls: whom to trust where the scheme is ``https``; None trusts whom the system trusts.
    """

    def __init__(self, timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._timeout_s = timeout_s
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def get(
        self, url: str, body: BinaryIO, bytes_max: int, *, accept: str = "*/*", token: str = "", address: str = ""
    ) -> None:
        """Write the body of what is there as it comes.

        Args:
            url: what to ask for.
            body: an empty file, or what is like one.
            bytes_max: most bytes of it.
            accept: in which form.
            token: sent as ``Authorization: Bearer``, if there is one.
            address: dialled in the host's stead; the host's name goes into ``Host`` and the TLS handshake.

        Raises:
            FetchError: anything but an answer of 200.
        """
        headers, name = {"Accept": accept} | ({"Authorization": f"Bearer {token}"} if token else {}), None
        if self._session is None:
            self._session = open_session(
                self._tls or True, {"User-Agent": "tracefit", "Accept-Encoding": _PLAIN}, self._timeout_s
            )
        try:
            target = URL(url, encoded=True)
            if address:
                headers["Host"] = target.raw_authority
                name = target.host if target.scheme == "https" else None
                target = target.with_host(address)
            async with self._session.get(
                target, headers=headers, server_hostname=name, allow_redirects=False
            ) as response:
                _check_head(response, bytes_max)
                async for part in response.content.iter_any():
                    if body.tell() + len(part) > bytes_max:
                        raise _too_large(bytes_max)
                    body.write(part)
        except TimeoutError:
            raise FetchError("unreachable", f"no answer within {self._timeout_s:g} s") from None
        except (OSError, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise FetchError("unreachable", sentence(error)) from None
        except (aiohttp.ClientError, ValueError) as error:
            raise FetchError("unexpected", f"no HTTP: {sentence(error)}") from None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


def _check_head(response: aiohttp.ClientResponse, bytes_max: int) -> None:
    if response.status != HTTPStatus.OK:
        outcome = "unauthenticated" if response.status in _UNAUTHENTICATED else "refused"
        raise FetchError(outcome, f"status {response.status} {response.reason}", response.status)
    if response.headers.get("Content-Encoding", _PLAIN) != _PLAIN:  # though nobody asked for it
        raise FetchError("unexpected", "a packed body")
    if (response.content_length or 0) > bytes_max:
        raise _too_large(bytes_max)


def _too_large(bytes_max: int) -> FetchError:
    return FetchError("too_large", f"larger than {bytes_max >> 20} MiB")
