"""Which pages need a token: all but those that scrapers and probes read."""

from __future__ import annotations

from collections.abc import Callable, Collection
from http import HTTPStatus

from exporters.pages.routing import Request, Response, Route, Routes, plain

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
