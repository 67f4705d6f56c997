"""The pages of the HTTP port: snapshots as documents, questions and answers, health, and the table of all.

docs/openapi.yaml describes them. The client bounds the work of an answer: a plan looks at some hundred loads, a load at
some dozen steps. A refusal is one line of text: 400 names the parameter, 404 and 422 say what is not there. A handler
maps a request to a response and may not block; sockets are the collector's business.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from exporters.blis import ALPHAS, BlisError, export
from exporters.metrics_page import MetricsPage
from exporters.questions import answer_query
from exporters.what_if import ClientView
from online import ConfigSnapshot, Snapshot
from tracefit import BadInputError, NotFoundError, TracefitError

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
YAML = "application/yaml"
STATE = "application/octet-stream"
_ALLOWED = "GET, HEAD"
_NOT_STORED = (("Cache-Control", "no-store"),)
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

    404 without a route, 405 for a method other than GET and HEAD. What a handler raises is the server's to log.
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
    return plain(HTTPStatus.NOT_FOUND)


def document(body: bytes, content_type: str) -> Response:
    """What is answered with a document; nobody keeps it."""
    return Response(HTTPStatus.OK, content_type, body, _NOT_STORED)


class SnapshotDocuments:
    """Documents of the newest snapshot; ``source`` returns it, or None before the first."""

    def __init__(self, source: Callable[[], Snapshot | None]) -> None:
        self._source = source

    def answer_snapshot(self, _: Request) -> Response:
        """Answer ``/snapshot``, whole or one configuration."""
        return self._answer(JSON, Snapshot.to_json)

    def answer_config(self, request: Request) -> Response:
        """Serve /snapshot/{config_id}: the same schema with one configuration."""

        def render(snapshot: Snapshot) -> bytes:
            config = _find(snapshot, request.captures[0])
            return msgspec.structs.replace(snapshot, configs=[config]).to_json()

        return self._answer(JSON, render)

    def answer_blis(self, request: Request) -> Response:
        """Serve /snapshot/{config_id}/blis.yaml; ``?format=flags``, ``?alpha=effective``."""
        file_format, alpha = request.query.get("format", "yaml"), request.query.get("alpha", "server")
        if file_format not in {"yaml", "flags"} or alpha not in ALPHAS:
            return plain(HTTPStatus.BAD_REQUEST, f"format is yaml or flags, alpha is one of {', '.join(ALPHAS)}")

        def render(snapshot: Snapshot) -> bytes:
            config = _find(snapshot, request.captures[0])
            return export(snapshot, config, f"blis-{file_format}", alpha=alpha)[0]

        return self._answer(YAML if file_format == "yaml" else TEXT, render)

    def _answer(self, content_type: str, render: Callable[[Snapshot], bytes]) -> Response:
        snapshot = self._source()
        try:
            return nothing_yet() if snapshot is None else document(render(snapshot), content_type)
        except LookupError:
            return plain(HTTPStatus.NOT_FOUND, "no such configuration in the newest snapshot")
        except BlisError as error:
            return plain(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))


def _find(snapshot: Snapshot, config_id: str) -> ConfigSnapshot:
    """The configuration with this id; LookupError without one."""
    return {config.config_id: config for config in snapshot.configs}[config_id]


def nothing_yet() -> Response:
    """What is answered before the first snapshot."""
    retry = (("Retry-After", str(RETRY_AFTER_S)), *_NOT_STORED)
    return plain(HTTPStatus.SERVICE_UNAVAILABLE, "nothing learned yet", retry)


def not_found(error: NotFoundError) -> Response:
    """What is answered where ``config`` means no configuration, or several."""
    return plain(HTTPStatus.BAD_REQUEST if error.several else HTTPStatus.NOT_FOUND, f"config: {error}")


class QuestionPages:
    """Answers of the newest snapshot to ``/predict`` and ``/plan``; ``clock_ns``: how old a level is, who is silent."""

    def __init__(self, view: ClientView, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._view = view
        self._clock_ns = clock_ns

    def answer(self, request: Request) -> Response:
        """What a step costs, or requests see; how many requests fit, and what limits them."""
        snapshot = self._view.snapshot()
        if snapshot is None:
            return nothing_yet()
        try:
            find = partial(self._view.meant, snapshot)
            answer = answer_query(request.path[1:], request.query, find, self._clock_ns())
        except BadInputError as error:
            return plain(HTTPStatus.BAD_REQUEST, str(error))
        except NotFoundError as error:
            return not_found(error)
        except TracefitError as error:
            return plain(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        return document(f"{answer.document()}\n".encode(), JSON)


Probe = Callable[[], tuple[bool, Mapping[str, object]]]


def answer_probe(probe: Probe) -> Response:
    """Serve a health check: its verdict is the status, its detail the body."""
    healthy, detail = probe()
    status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
    body = msgspec.json.encode({"ok": healthy, **detail}, order="sorted") + b"\n"
    return Response(status, JSON, body, _NOT_STORED)


def make_routes(
    metrics: MetricsPage,
    documents: SnapshotDocuments,
    *,
    alive: Probe,
    ready: Probe,
    status_page: Handler | None = None,
    questions: QuestionPages | None = None,
    state: Callable[[], bytes | None] | None = None,
) -> Routes:
    """The table of routes; what is not given is a 404.

    ``alive`` and ``ready`` are (ok, detail) of the process and of the receivers, the detail as JSON; ``state``, what
    /state shows, returns None before the first.
    """
    routes: dict[str, Handler] = {
        "/metrics": lambda _: Response(HTTPStatus.OK, CONTENT_TYPE_PLAIN_0_0_4, metrics.render()),
        "/healthz": lambda _: answer_probe(alive),
        "/readyz": lambda _: answer_probe(ready),
        "/snapshot": documents.answer_snapshot,
        "/snapshot/*": documents.answer_config,
        "/snapshot/*/blis.yaml": documents.answer_blis,
    }
    if status_page is not None:
        routes["/"] = status_page
    if questions is not None:
        routes |= dict.fromkeys(("/predict", "/plan"), questions.answer)
    if state is not None:
        routes["/state"] = lambda _: nothing_yet() if (learned := state()) is None else document(learned, STATE)
    return routes


OPEN_PAGES = frozenset({"/metrics", "/healthz", "/readyz"})


def protect(routes: Routes, accepts: Callable[[str | None], bool]) -> Routes:
    """The same routes, but outside of ``OPEN_PAGES`` a request without an accepted Authorization header is a 401."""

    def guarded(handler: Handler) -> Handler:
        def answer(request: Request) -> Response:
            if accepts(request.headers.get("Authorization")):
                return handler(request)
            return plain(HTTPStatus.UNAUTHORIZED, headers=(("WWW-Authenticate", "Bearer"),))

        return answer

    return {pattern: each if pattern in OPEN_PAGES else guarded(each) for pattern, each in routes.items()}
