"""The pages of a sidecar: all of them by route, one answer, and behind a real socket on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from prometheus_client import CollectorRegistry

from collector.config import Endpoint
from collector.runtime import running
from collector.runtime.http import HttpServer, make_page_server
from exporters.pages import Response, Routes, dispatch
from exporters.status_page import StatusPage
from exporters.what_if import Advisory


def healthy():
    """What a probe says."""
    return True, {}


def routes_of(source, own=None, *, unix_nano=0, advisory=None, alive=healthy, ready=healthy, **page) -> Routes:
    """Every page; ``source`` returns the newest snapshot, ``page`` has what is for the status page alone."""
    own, advisory = CollectorRegistry() if own is None else own, advisory or Advisory()
    page = StatusPage(source, own, ready=ready, unix_nano=lambda: unix_nano, advisory=advisory, **page)
    return page.routes(alive, lambda: None)


def answer_to(target: str, snapshot, *given, **kwargs) -> Response:
    """What these pages answer, all of one snapshot."""
    return dispatch(routes_of(lambda: snapshot, *given, **kwargs), "GET", target, {})


@contextmanager
def serving(routes, *, address="127.0.0.1", port=0) -> Iterator[HttpServer]:
    """A server of these routes."""
    server = make_page_server(Endpoint(address, port), partial(dispatch, routes))
    with running(server):
        yield server
