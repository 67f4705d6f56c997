"""The pages of the HTTP port: snapshots as documents, questions and answers, health, and the table of all.

docs/openapi.yaml describes them. The client bounds the work of an answer: a plan looks at some hundred loads, a load at
some dozen steps. A refusal is one line of text: 400 names the parameter, 404 and 422 say what is not there. A handler
maps a request to a response and may not block; sockets are the collector's business.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from http import HTTPStatus
from threading import Lock
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from exporters.blis import BlisError, export
from exporters.metrics_page import render_metrics, snapshot_families
from exporters.questions import answer_query, as_json
from exporters.what_if import Advisory
from online import ConfigSnapshot, Snapshot
from tracefit import BadInputError, NotFoundError, TracefitError

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
YAML = "application/yaml"
STATE = "application/octet-stream"
_ALLOWED = "GET, HEAD"
_NOT_STORED = (("Cache-Control", "no-store"),)
_KEPT_NS = 5_000_000_000
"""How long metrics of one generation are shown as they are: rendering takes a millisecond a configuration."""
RETRY_AFTER_S = 5
"""A first snapshot is due about this soon after the first telemetry (vLLM's exporter flushes every 5 s)."""


class Request(NamedTuple):
    """What a handler may look at; ``query`` has the last value of a parameter."""

    path: str
    captures: tuple[str, ...]
    query: Mapping[str, str]
    headers: Mapping[str, str]


class Response(NamedTuple):
    """What a handler answers; Content-Length and Date are the server's business."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


Handler = Callable[[Request], Response]
Routes = Mapping[str, Handler]
"""Handlers by path; a ``*`` matches one non-empty segment, which is handed over as a capture."""


def plain(status: HTTPStatus, text: str = "", headers: tuple[tuple[str, str], ...] = ()) -> Response:
    """A one-line text answer; the status' own phrase unless ``text`` is given."""
    return Response(status, TEXT, f"{text or status.phrase}\n".encode(), headers)


def dispatch(routes: Routes, method: str, target: str, headers: Mapping[str, str]) -> Response:
    """Find the route of a request target, as sent and with its query, and run it; the first that matches wins.

    404 without a route, which names the routes; 405 for a method other than GET and HEAD. What a handler raises is the
    server's to log.
    """
    try:
        parts = urlsplit(target)
        query = dict(parse_qsl(parts.query, keep_blank_values=True, max_num_fields=32))
    except ValueError:
        return plain(HTTPStatus.BAD_REQUEST)
    for pattern, handler in routes.items():
        found = re.fullmatch(re.escape(pattern).replace(r"\*", "([^/]+)"), parts.path)
        if found is None:
            continue
        if method not in {"GET", "HEAD"}:
            return plain(HTTPStatus.METHOD_NOT_ALLOWED, headers=(("Allow", _ALLOWED),))
        return handler(Request(parts.path, tuple(map(unquote, found.groups())), query, headers))
    return plain(HTTPStatus.NOT_FOUND, f"no such page; there are {', '.join(routes)}")


def document(body: bytes, content_type: str) -> Response:
    """What is answered with a document; nobody keeps it."""
    return Response(HTTPStatus.OK, content_type, body, _NOT_STORED)


def nothing_yet() -> Response:
    """What is answered before the first snapshot."""
    retry = (("Retry-After", str(RETRY_AFTER_S)), *_NOT_STORED)
    return plain(HTTPStatus.SERVICE_UNAVAILABLE, "nothing learned yet", retry)


def not_found(error: NotFoundError) -> Response:
    """What is answered where ``config`` means no configuration, or several."""
    return plain(HTTPStatus.BAD_REQUEST if error.several else HTTPStatus.NOT_FOUND, f"config: {error}")


Probe = Callable[[], tuple[bool, Mapping[str, object]]]


def answer_probe(probe: Probe) -> Response:
    """Serve a health check: its verdict is the status, its detail the body."""
    healthy, detail = probe()
    status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
    body = msgspec.json.encode({"ok": healthy, **detail}, order="sorted") + b"\n"
    return Response(status, JSON, body, _NOT_STORED)


def make_routes(
    source: Callable[[], Snapshot | None],
    own: Collector,
    unix_nano: Callable[[], int],
    *,
    alive: Probe,
    ready: Probe,
    advisory: Advisory,
    status_page: Handler,
    state: Callable[[], bytes | None] | None,
) -> Routes:
    """The table of routes.

    Args:
        source: returns the newest snapshot, None before the first.
        own: the process's own metrics.
        unix_nano: the clock: how old a level is, who is silent.
        alive: (ok, detail) of the process, the detail as JSON.
        ready: the same of the receivers.
        advisory: what the coefficients say, of the load and to questions.
        status_page: answers /.
        state: what /state shows, None before the first; without it that is a 404.
    """

    def of_snapshot(render: Callable[[Snapshot, Request], Response]) -> Handler:
        def answer(request: Request) -> Response:
            snapshot = source()
            try:
                return nothing_yet() if snapshot is None else render(snapshot, request)
            except BadInputError as error:
                return plain(HTTPStatus.BAD_REQUEST, str(error))
            except NotFoundError as error:
                return not_found(error)
            except (BlisError, TracefitError) as error:
                return plain(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))

        return answer

    routes: dict[str, Handler] = {
        "/metrics": _metrics(source, own, unix_nano, advisory),
        "/healthz": lambda _: answer_probe(alive),
        "/readyz": lambda _: answer_probe(ready),
        "/snapshot": of_snapshot(lambda snapshot, _: document(snapshot.to_json(), JSON)),
        "/snapshot/*": of_snapshot(_one_config),
        "/snapshot/*/blis.yaml": of_snapshot(_blis),
        "/": status_page,
        **dict.fromkeys(("/predict", "/plan"), of_snapshot(partial(_answer, advisory, unix_nano))),
    }
    if state is not None:
        routes["/state"] = lambda _: nothing_yet() if (learned := state()) is None else document(learned, STATE)
    return routes


def _metrics(
    source: Callable[[], Snapshot | None], own: Collector, unix_nano: Callable[[], int], advisory: Advisory
) -> Handler:
    """Metrics of the newest snapshot, rendered once however many ask, and of the process."""
    lock = Lock()

    @lru_cache(maxsize=1)
    def of_newest(_generation: int | None, tick: int) -> bytes:
        snapshot = source()
        return b"" if snapshot is None else render_metrics(snapshot_families(snapshot, advisory, tick * _KEPT_NS))

    def answer(_: Request) -> Response:
        snapshot = source()
        with lock:
            learned = of_newest(None if snapshot is None else snapshot.generation, unix_nano() // _KEPT_NS)
        return Response(HTTPStatus.OK, CONTENT_TYPE_PLAIN_0_0_4, learned + render_metrics(own.collect()))

    return answer


def _one_config(snapshot: Snapshot, request: Request) -> Response:
    """The same schema with one configuration."""
    return document(msgspec.structs.replace(snapshot, configs=[_asked(snapshot, request)]).to_json(), JSON)


def _blis(snapshot: Snapshot, request: Request) -> Response:
    """The file for BLIS; ``tracefit export`` has flags and another alpha, also from an address."""
    return document(export(snapshot, _asked(snapshot, request))[0], YAML)


def _asked(snapshot: Snapshot, request: Request) -> ConfigSnapshot:
    """The configuration with the id in the path; NotFoundError without one."""
    found = next((each for each in snapshot.configs if each.config_id == request.captures[0]), None)
    if found is None:
        raise NotFoundError("no such configuration in the newest snapshot", several=False)
    return found


def _answer(advisory: Advisory, unix_nano: Callable[[], int], snapshot: Snapshot, request: Request) -> Response:
    """What a step costs, or requests see; how many requests fit, and what limits them."""
    answer = answer_query(request.path[1:], request.query, partial(advisory.meant, snapshot), unix_nano())
    return document(f"{as_json(answer.document())}\n".encode(), JSON)


OPEN_PAGES = frozenset({"/metrics", "/healthz", "/readyz"})


def protect(routes: Routes, accepts: Callable[[str | None], bool], refusal: str = "a bearer token is needed") -> Routes:
    """The same routes, but outside of ``OPEN_PAGES`` a request without an accepted Authorization header is a 401."""

    def guarded(handler: Handler) -> Handler:
        def answer(request: Request) -> Response:
            if accepts(request.headers.get("Authorization")):
                return handler(request)
            return plain(HTTPStatus.UNAUTHORIZED, refusal, headers=(("WWW-Authenticate", "Bearer"),))

        return answer

    return {pattern: each if pattern in OPEN_PAGES else guarded(each) for pattern, each in routes.items()}
