"""A route table behind a real socket on loopback."""

from __future__ import annotations

from functools import partial

from collector.config import Endpoint
from collector.runtime.http import HttpServer, page_handler
from exporters.pages import dispatch


def page_server(routes, *, address="127.0.0.1", port=0, timeout_s=10.0, **kwargs) -> HttpServer:
    """Not started yet."""
    handler = page_handler(partial(dispatch, routes))
    return HttpServer(Endpoint(address, port), handler, ("the pages", "pages"), timeout_s=timeout_s, **kwargs)
