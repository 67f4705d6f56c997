"""The pages of the HTTP port, as one table.

| path | answers |
|---|---|
| /metrics | Prometheus text or OpenMetrics, gzip on request |
| /healthz | 200 while the process is alive, 503 otherwise; JSON detail |
| /readyz | 200 while it accepts telemetry, 503 otherwise; JSON detail |
| /snapshot | the newest snapshot; strong ETag, 304, Last-Modified; 503 + Retry-After before the first |
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from online.snapshot import Snapshot

from .exposition import MetricsPage
from .http import Request, Response, Route, Routes, plain

JSON = "application/json"
RETRY_AFTER_S = 5
"""A first snapshot is due about this soon after the first telemetry (vLLM's exporter flushes every 5 s)."""

Probe = Callable[[], tuple[bool, Mapping[str, object]]]


class Document(NamedTuple):
    """Bytes with their validators."""

    body: bytes
    content_type: str
    etag: str
    last_modified: str


def make_document(body: bytes, content_type: str, modified_unix_nano: int) -> Document:
    """Attach a strong entity tag (over the exact bytes) and a date."""
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return Document(body, content_type, etag, formatdate(modified_unix_nano / 1e9, usegmt=True))


class SnapshotDocuments:
    """The newest snapshot as bytes, rendered once per generation.

    Args:
        source: returns the newest snapshot, or None before the first.
    """

    def __init__(self, source: Callable[[], Snapshot | None]) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._shown: Snapshot | None = None
        self._document: Document | None = None

    def current(self) -> Document | None:
        """The newest snapshot's document; None before the first."""
        with self._lock:
            snapshot = self._source()
            if snapshot is not self._shown:
                self._shown = snapshot
                self._document = None
                if snapshot is not None:
                    self._document = make_document(snapshot.to_json(), JSON, snapshot.created_unix_nano)
            return self._document


def answer_document(document: Document | None, request: Request) -> Response:
    """Serve a document: 503 if there is none yet, 304 if the client has it.

    ``If-Modified-Since`` is not looked at: two generations can share a second.
    """
    if document is None:
        retry = (("Retry-After", str(RETRY_AFTER_S)), ("Cache-Control", "no-store"))
        return plain(HTTPStatus.SERVICE_UNAVAILABLE, "nothing learned yet", retry)
    validators = (
        ("ETag", document.etag),
        ("Last-Modified", document.last_modified),
        ("Cache-Control", "no-cache"),  # store it, but ask before every use
    )
    if _has(request.header("If-None-Match"), document.etag):
        return Response(HTTPStatus.NOT_MODIFIED, document.content_type, b"", validators)
    return Response(HTTPStatus.OK, document.content_type, document.body, validators)


def _has(if_none_match: str, etag: str) -> bool:
    """Weak comparison, as RFC 9110 §13.1.2 demands for If-None-Match."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return etag in tags or tags == ["*"]


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


def make_routes(metrics: MetricsPage, documents: SnapshotDocuments, *, alive: Probe, ready: Probe) -> Routes:
    """The table of routes.

    Args:
        metrics: what /metrics shows.
        documents: what /snapshot shows.
        alive: (ok, detail) of the process; the detail must be JSON.
        ready: (ok, detail) of the receivers.
    """
    return (
        Route("/metrics", lambda request: answer_metrics(metrics, request)),
        Route("/healthz", lambda _: answer_probe(alive)),
        Route("/readyz", lambda _: answer_probe(ready)),
        Route("/snapshot", lambda request: answer_document(documents.current(), request)),
    )
