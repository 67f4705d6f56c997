"""The snapshot as documents: whole, one configuration, and that configuration for BLIS.

Every document is rendered at most once per generation and kept until the next, so a puller that asks again pays for a
comparison of tags only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from exporters.blis import ALPHAS, BlisError, blis_coefficients
from exporters.blis_files import render_flags, render_yaml
from exporters.client_view import PerGeneration
from exporters.pages.routing import TEXT, Request, Response, plain
from online import ConfigSnapshot, Snapshot

JSON = "application/json"
YAML = "application/yaml"
STATE = "application/octet-stream"
RETRY_AFTER_S = 5
"""A first snapshot is due about this soon after the first telemetry (vLLM's exporter flushes every 5 s)."""


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
