"""Requests, responses, the table that leads from one to the other, and which of its rows need a token; no sockets.

A handler maps a request to a response and may not block; a failing one is a 500 without its text. All pages but those
that scrapers and probes read can be made to need a token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus
from typing import NamedTuple, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

TEXT = "text/plain; charset=utf-8"
_ALLOWED = "GET, HEAD"


class Headers(Protocol):
    """Request headers; lookup without regard to case."""

    def get(self, name: str, /) -> str | None:
        """Value of a header, None if absent."""


class Request(NamedTuple):
    """What a handler may look at.

    ``repeated`` is a parameter that was given twice, whose last value ``query`` has; ``empty`` one that was given
    without a value, as forms give fields that nobody filled in, which ``query`` has not.
    """

    path: str
    captures: tuple[str, ...]
    query: Mapping[str, str]
    headers: Headers
    repeated: str = ""
    empty: str = ""

    def header(self, name: str) -> str:
        """Value of a header, empty if absent."""
        return self.headers.get(name) or ""


class Response(NamedTuple):
    """What a handler answers; Content-Length and Date are the server's business."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class Route(NamedTuple):
    """A row of the route table.

    ``pattern`` is a path whose ``*`` segments match one non-empty segment each and are handed over as captures.
    """

    pattern: str
    handler: Callable[[Request], Response]


Routes = tuple[Route, ...]


def plain(status: HTTPStatus, text: str = "", headers: tuple[tuple[str, str], ...] = ()) -> Response:
    """A one-line text answer; the status' own phrase unless ``text`` is given."""
    return Response(status, TEXT, f"{text or status.phrase}\n".encode(), headers)


def dispatch(routes: Routes, method: str, target: str, headers: Headers) -> Response:
    """Find the route of a request target and run it.

    Args:
        routes: the table; the first match wins.
        method: the request's method.
        target: the request target as sent, with the query.
        headers: the request's headers, looked up without regard to case.

    Returns:
        The handler's response; 404 without a route, 405 for a method other than GET and HEAD, 500 if the handler fails.
    """
    try:
        parts = urlsplit(target)
        pairs = parse_qsl(parts.query, keep_blank_values=True, max_num_fields=32)
    except ValueError:
        return plain(HTTPStatus.BAD_REQUEST)
    given = [(name, value) for name, value in pairs if value]
    query, repeated = dict(given), _repeated([name for name, _ in given])
    empty = next((name for name, value in pairs if not value), "")
    segments = parts.path.split("/")
    for route in routes:
        captures = _match(route.pattern.split("/"), segments)
        if captures is None:
            continue
        if method not in {"GET", "HEAD"}:
            return plain(HTTPStatus.METHOD_NOT_ALLOWED, headers=(("Allow", _ALLOWED),))
        try:
            return route.handler(Request(parts.path, captures, query, headers, repeated, empty))
        except Exception:  # noqa: BLE001 - a page that fails must not take the server, nor show its inside
            return plain(HTTPStatus.INTERNAL_SERVER_ERROR)
    return plain(HTTPStatus.NOT_FOUND)


def _repeated(names: list[str]) -> str:
    """The first name that is there twice, empty if none is."""
    return next((name for index, name in enumerate(names) if name in names[:index]), "")


def _match(pattern: list[str], segments: list[str]) -> tuple[str, ...] | None:
    if len(pattern) != len(segments):
        return None
    captures = []
    for expected, segment in zip(pattern, segments, strict=True):
        if expected == "*" and segment:
            captures.append(unquote(segment))
        elif expected != segment:
            return None
    return tuple(captures)


OPEN_PAGES = frozenset({"/metrics", "/healthz", "/readyz"})


def protect(routes: Routes, accepts: Callable[[str | None], bool], open_pages: Collection[str] = OPEN_PAGES) -> Routes:
    """The same routes, but outside of ``open_pages`` a request without an accepted Authorization header is a 401."""
    return tuple(route if route.pattern in open_pages else _guarded(route, accepts) for route in routes)


def _guarded(route: Route, accepts: Callable[[str | None], bool]) -> Route:
    def handler(request: Request) -> Response:
        if not accepts(request.headers.get("Authorization")):
            return plain(HTTPStatus.UNAUTHORIZED, headers=(("WWW-Authenticate", "Bearer"),))
        return route.handler(request)

    return Route(route.pattern, handler)
