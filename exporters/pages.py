"""The pages of the HTTP port: snapshots as documents, questions and answers, health, and the table of all.

| path | answers |
|---|---|
| / | the status page; ?config=ID for one configuration |
| /metrics | Prometheus text, gzip on request |
| /healthz | 200 while the process is alive, 503 otherwise; JSON detail |
| /readyz | 200 while it accepts telemetry, 503 otherwise; JSON detail |
| /snapshot | the newest snapshot; strong ETag, 304, Last-Modified; 503 + Retry-After before the first |
| /snapshot/{config_id} | the same with one configuration; 404 if it is not in the newest snapshot |
| /snapshot/{config_id}/blis.yaml | for BLIS; ?format=flags, ?alpha=effective; 422 with the reason if it cannot be |
| /predict | what a step costs, or what requests see at a load; JSON, the parameters of ``tracefit predict`` |
| /state | what was learned as a state file, to be merged with others'; strong ETag, 304; where it is switched on |
| /plan | how many requests fit the targets; JSON, the parameters of ``tracefit plan`` |

docs/openapi.yaml describes them. A document is rendered at most once per generation and kept until the next, so a
puller that asks again pays for a comparison of tags only. The work of an answer is bounded by the client: a plan looks
at no more than some hundred loads, and a load at no more than some dozen steps. A refusal is one line of text: 400
names the parameter, 404 and 422 say what is not there. A handler maps a request to a response and may not block; a
failing one is a 500 without its text. Sockets are the collector's business.
"""

from __future__ import annotations

import gzip
import hashlib
import time
from collections.abc import Callable, Collection, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, gzip_accepted

from exporters.blis import ALPHAS, BlisError, blis_coefficients, render_flags, render_yaml
from exporters.metrics_page import MetricsPage
from exporters.what_if import (
    PLAN,
    PREDICT,
    SHOWN_CHARS,
    ClientView,
    Parameter,
    PerGeneration,
    QuestionError,
    as_json,
    complete,
    plan_document,
    planned,
    predict_document,
    predicted,
    read_query,
    read_sizing,
    read_step_or_load,
)
from online import ConfigSnapshot, Snapshot
from tracefit import Config, NotFoundError, TracefitError

TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
YAML = "application/yaml"
STATE = "application/octet-stream"
_GZIP_LEVEL = 6
_ALLOWED = "GET, HEAD"
RETRY_AFTER_S = 5
"""A first snapshot is due about this soon after the first telemetry (vLLM's exporter flushes every 5 s)."""


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


class Page(Protocol):
    """A page that answers requests."""

    def answer(self, request: Request, /) -> Response:
        """The page for one request."""


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


class SnapshotDocument(NamedTuple):
    """Bytes with their validators; ``last_modified`` is empty where nobody knows it."""

    body: bytes
    content_type: str
    etag: str
    last_modified: str


def make_document(body: bytes, content_type: str, modified_unix_nano: int = 0) -> SnapshotDocument:
    """Attach a strong entity tag (over the exact bytes), and a date if one is given."""
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    date = formatdate(modified_unix_nano / 1e9, usegmt=True) if modified_unix_nano else ""
    return SnapshotDocument(body, content_type, etag, date)


class SnapshotDocuments:
    """Documents of the newest snapshot.

    Args:
        source: returns the newest snapshot, or None before the first.
    """

    def __init__(self, source: Callable[[], Snapshot | None]) -> None:
        self._source = source
        self._documents = PerGeneration[tuple[str, ...], SnapshotDocument | None]()

    def answer_snapshot(self, request: Request) -> Response:
        """Answer ``/snapshot``, whole or one configuration."""
        return self._answer(request, ("snapshot",), lambda snapshot: snapshot.to_json(), JSON)

    def answer_config(self, request: Request) -> Response:
        """Serve /snapshot/{config_id}: the same schema with one configuration."""

        def render(snapshot: Snapshot) -> bytes:
            config = _find(snapshot, request.captures[0])
            return msgspec.structs.replace(snapshot, configs=[config]).to_json()

        return self._answer(request, ("config", request.captures[0]), render, JSON)

    def answer_blis(self, request: Request) -> Response:
        """Serve /snapshot/{config_id}/blis.yaml; ``?format=flags``, ``?alpha=effective``."""
        file_format, alpha = request.query.get("format", "yaml"), request.query.get("alpha", "server")
        if file_format not in {"yaml", "flags"} or alpha not in ALPHAS:
            return plain(HTTPStatus.BAD_REQUEST, f"format is yaml or flags, alpha is one of {', '.join(ALPHAS)}")

        def render(snapshot: Snapshot) -> bytes:
            config = _find(snapshot, request.captures[0])
            coefficients = blis_coefficients(config, alpha=alpha)
            return render_flags(coefficients) if file_format == "flags" else render_yaml(snapshot, config, coefficients)

        content_type = YAML if file_format == "yaml" else TEXT
        return self._answer(request, ("blis", request.captures[0], file_format, alpha), render, content_type)

    def _answer(
        self, request: Request, key: tuple[str, ...], render: Callable[[Snapshot], bytes], content_type: str
    ) -> Response:
        def make(snapshot: Snapshot | None) -> SnapshotDocument | None:
            if snapshot is None:
                return None
            return make_document(render(snapshot), content_type, snapshot.created_unix_nano)

        try:
            document = self._documents.get(self._source, key, make)
        except _UnknownConfigError:
            return plain(HTTPStatus.NOT_FOUND, "no such configuration in the newest snapshot")
        except BlisError as error:
            return plain(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        return answer_document(document, request)


class _UnknownConfigError(LookupError):
    """The newest snapshot has no such configuration."""


def _find(snapshot: Snapshot, config_id: str) -> ConfigSnapshot:
    for config in snapshot.configs:
        if config.config_id == config_id:
            return config
    raise _UnknownConfigError(config_id)


def nothing_yet() -> Response:
    """What is answered before the first snapshot."""
    retry = (("Retry-After", str(RETRY_AFTER_S)), ("Cache-Control", "no-store"))
    return plain(HTTPStatus.SERVICE_UNAVAILABLE, "nothing learned yet", retry)


def answer_document(document: SnapshotDocument | None, request: Request) -> Response:
    """Serve a document: 503 if there is none yet, 304 if the client has it.

    ``If-Modified-Since`` is not looked at: two generations can share a second.
    """
    if document is None:
        return nothing_yet()
    modified = (("Last-Modified", document.last_modified),) if document.last_modified else ()
    # store it, but ask before every use
    validators = (("ETag", document.etag), *modified, ("Cache-Control", "no-cache"))
    if _has(request.header("If-None-Match"), document.etag):
        return Response(HTTPStatus.NOT_MODIFIED, document.content_type, b"", validators)
    return Response(HTTPStatus.OK, document.content_type, document.body, validators)


def _has(if_none_match: str, etag: str) -> bool:
    """Weak comparison, as RFC 9110 §13.1.2 demands for If-None-Match."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return etag in tags or tags == ["*"]


_Answer = Callable[[Config, Mapping[str, Any]], dict[str, object]]


class AskPages:
    """Answers from the newest snapshot; ``clock_ns`` tells how old a level is."""

    def __init__(self, view: ClientView, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._view = view
        self._clock_ns = clock_ns

    def answer_predict(self, request: Request) -> Response:
        """Answer ``/predict``: what one step costs, or what requests see at a load."""
        return self._answer(request, PREDICT, self._predict)

    def answer_plan(self, request: Request) -> Response:
        """Answer ``/plan``: how many requests fit the targets, and what limits them."""
        return self._answer(request, PLAN, _plan)

    def _answer(self, request: Request, parameters: tuple[Parameter, ...], answer: _Answer) -> Response:
        snapshot = self._view.snapshot()
        try:
            if request.repeated:
                raise QuestionError(request.repeated[:SHOWN_CHARS], "given twice")
            if request.empty:
                raise QuestionError(request.empty[:SHOWN_CHARS], "given without a value")
            given = read_query(request.query, parameters)
            if snapshot is None:
                return nothing_yet()
            tree = answer(self._view.config(snapshot, given.get("config", "")), given)
        except QuestionError as error:
            return plain(HTTPStatus.BAD_REQUEST, str(error))
        except NotFoundError as error:
            status = HTTPStatus.BAD_REQUEST if error.several else HTTPStatus.NOT_FOUND
            return plain(status, f"config: {error}")
        except TracefitError as error:
            return plain(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        return Response(HTTPStatus.OK, JSON, f"{as_json(tree)}\n".encode(), (("Cache-Control", "no-store"),))

    def _predict(self, config: Config, given: Mapping[str, Any]) -> dict[str, object]:
        question = read_step_or_load(given)
        config = config.now(self._clock_ns()) if given.get("now") else config
        question = complete(config, question)
        return predict_document(config, question, predicted(config, question))


def _plan(config: Config, given: Mapping[str, Any]) -> dict[str, object]:
    question = read_sizing(given)
    return plan_document(config, question, planned(config, question))


Probe = Callable[[], tuple[bool, Mapping[str, object]]]


def answer_probe(probe: Probe) -> Response:
    """Serve a health check: its verdict is the status, its detail the body."""
    healthy, detail = probe()
    status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
    body = msgspec.json.encode({"ok": healthy, **detail}, order="sorted") + b"\n"
    return Response(status, JSON, body, (("Cache-Control", "no-store"),))


def answer_metrics(page: MetricsPage, request: Request) -> Response:
    """Serve /metrics, compressed where the scraper takes that."""
    body = page.render()
    headers: tuple[tuple[str, str], ...] = (("Vary", "Accept-Encoding"),)
    if gzip_accepted(request.header("Accept-Encoding")):
        body, headers = gzip.compress(body, _GZIP_LEVEL, mtime=0), (*headers, ("Content-Encoding", "gzip"))
    return Response(HTTPStatus.OK, CONTENT_TYPE_PLAIN_0_0_4, body, headers)


def answer_state(state: bytes | None, request: Request) -> Response:
    """Serve a state file; nothing of it is kept."""
    return answer_document(None if state is None else make_document(state, STATE), request)


def make_routes(
    metrics: MetricsPage,
    documents: SnapshotDocuments,
    *,
    alive: Probe,
    ready: Probe,
    status_page: Page | None = None,
    questions: AskPages | None = None,
    state: Callable[[], bytes | None] | None = None,
) -> Routes:
    """The table of routes.

    Args:
        metrics: what /metrics shows.
        documents: what /snapshot shows.
        alive: (ok, detail) of the process; the detail must be JSON.
        ready: (ok, detail) of the receivers.
        status_page: what / shows; without it / is 404.
        questions: what /predict and /plan ask; without it they are 404.
        state: what /state shows, None before the first; without it that is 404.
    """
    home = () if status_page is None else (Route("/", status_page.answer),)
    asked: Routes = ()
    if questions is not None:
        asked = (Route("/predict", questions.answer_predict), Route("/plan", questions.answer_plan))
    if state is not None:
        asked = (*asked, Route("/state", lambda request: answer_state(state(), request)))
    return (
        *home,
        Route("/metrics", lambda request: answer_metrics(metrics, request)),
        Route("/healthz", lambda _: answer_probe(alive)),
        Route("/readyz", lambda _: answer_probe(ready)),
        Route("/snapshot", documents.answer_snapshot),
        Route("/snapshot/*", documents.answer_config),
        Route("/snapshot/*/blis.yaml", documents.answer_blis),
        *asked,
    )


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
