"""The pages of the HTTP port, as one table.

| path | answers |
|---|---|
| / | the status page; ?config=ID for one configuration |
| /metrics | Prometheus text or OpenMetrics, gzip on request |
| /healthz | 200 while the process is alive, 503 otherwise; JSON detail |
| /readyz | 200 while it accepts telemetry, 503 otherwise; JSON detail |
| /snapshot | the newest snapshot; strong ETag, 304, Last-Modified; 503 + Retry-After before the first |
| /snapshot/{config_id} | the same with one configuration; 404 if it is not in the newest snapshot |
| /snapshot/{config_id}/blis.yaml | for BLIS; ?format=flags, ?alpha=effective; 422 with the reason if it cannot be |
| /predict | what a step costs, or what requests see at a load; JSON, the parameters of ``tracefit predict`` |
| /state | what was learned as a state file, to be merged with others'; strong ETag, 304; where it is switched on |
| /plan | how many requests fit the targets; JSON, the parameters of ``tracefit plan`` |

docs/openapi.yaml describes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus

import msgspec

from exporters.metrics_page import MetricsPage
from exporters.pages import (
    JSON,
    STATE,
    AskPages,
    Request,
    Response,
    Route,
    Routes,
    SnapshotDocuments,
    answer_document,
    make_document,
)
from exporters.status_page import StatusPage

Probe = Callable[[], tuple[bool, Mapping[str, object]]]


def answer_probe(probe: Probe) -> Response:
    """Serve a health check: its verdict is the status, its detail the body."""
    healthy, detail = probe()
    status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
    body = msgspec.json.encode({"ok": healthy, **detail}, order="sorted") + b"\n"
    return Response(status, JSON, body, (("Cache-Control", "no-store"),))


def answer_metrics(page: MetricsPage, request: Request) -> Response:
    """Serve /metrics in the format and encoding the scraper asks for."""
    rendered = page.render(request.header("Accept"), request.header("Accept-Encoding"))
    headers: tuple[tuple[str, str], ...] = (("Vary", "Accept, Accept-Encoding"),)
    if rendered.content_encoding:
        headers = (*headers, ("Content-Encoding", rendered.content_encoding))
    return Response(HTTPStatus.OK, rendered.content_type, rendered.body, headers)


def answer_state(state: bytes | None, request: Request) -> Response:
    """Serve a state file; nothing of it is kept."""
    return answer_document(None if state is None else make_document(state, STATE), request)


def make_routes(
    metrics: MetricsPage,
    documents: SnapshotDocuments,
    *,
    alive: Probe,
    ready: Probe,
    status_page: StatusPage | None = None,
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
