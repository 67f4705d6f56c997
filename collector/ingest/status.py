"""The one place where an outcome becomes a status that a client sees.

| outcome | gRPC | HTTP | retried by a client |
|---|---|---|---|
| accepted, or empty | OK | 200 | |
| queue or log full or broken, memory short | RESOURCE_EXHAUSTED + RetryInfo | 503 + Retry-After | after the hint |
| shutting down | UNAVAILABLE | 503 | yes, on a new connection |
| undecodable | INVALID_ARGUMENT | 400 | no |
| of a service, path or method that is not served | UNIMPLEMENTED | 404, 405 | no |
| larger than allowed, in bytes, spans or fields | INVALID_ARGUMENT | 413 | no |
| no token, or a wrong one | UNAUTHENTICATED | 401 | no |
| the message never came | INVALID_ARGUMENT | 408 | no |
| our own fault | INTERNAL, text constant | 500 | no |

503 rather than 429: the Python exporter retries server errors only. RESOURCE_EXHAUSTED rather than UNAVAILABLE for a
full queue: on UNAVAILABLE it also rebuilds its channel. RetryInfo goes out twice, because that exporter reads only the
trailer ``google.rpc.retryinfo-bin`` (1.26 to 1.45), while the OTLP specification puts it into
``grpc-status-details-bin``.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import NamedTuple

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from collector.telemetry import Outcome

TRAILER_RETRY_PYTHON = "google.rpc.retryinfo-bin"
TRAILER_STATUS_DETAILS = "grpc-status-details-bin"

RETRY_S = 1.9
"""When a client that is refused shall come again: five such sleeps fit the 10 s budget of the Python exporter."""

_CODE = grpc.StatusCode
_STATUS = {
    Outcome.QUEUE_FULL: (_CODE.RESOURCE_EXHAUSTED, HTTPStatus.SERVICE_UNAVAILABLE, "queue full"),
    Outcome.MEMORY: (_CODE.RESOURCE_EXHAUSTED, HTTPStatus.SERVICE_UNAVAILABLE, "memory limit"),
    Outcome.LOG: (_CODE.RESOURCE_EXHAUSTED, HTTPStatus.SERVICE_UNAVAILABLE, "log full, or not to be written"),
    Outcome.SHUTTING_DOWN: (_CODE.UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE, "shutting down"),
    Outcome.UNDECODABLE: (_CODE.INVALID_ARGUMENT, HTTPStatus.BAD_REQUEST, "not an ExportTraceServiceRequest"),
    Outcome.TOO_LARGE: (
        _CODE.INVALID_ARGUMENT,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "too many bytes, spans or fields in one export",
    ),
    Outcome.INCOMPLETE: (_CODE.INVALID_ARGUMENT, HTTPStatus.REQUEST_TIMEOUT, "the message did not come"),
    Outcome.UNAUTHENTICATED: (_CODE.UNAUTHENTICATED, HTTPStatus.UNAUTHORIZED, "a bearer token is needed"),
    Outcome.FAILED: (_CODE.INTERNAL, HTTPStatus.INTERNAL_SERVER_ERROR, "internal error"),
}


class Answer(NamedTuple):
    """How a call ends that is not taken, over either transport."""

    outcome: Outcome
    code: grpc.StatusCode
    status: HTTPStatus
    text: str

    @property
    def may_repeat(self) -> bool:
        """Whether the client shall come again after ``RETRY_S``."""
        return self.code is _CODE.RESOURCE_EXHAUSTED

    @property
    def trailers(self) -> tuple[tuple[str, bytes], ...]:
        """Of gRPC: when to try again, where that makes sense."""
        if not self.may_repeat:
            return ()
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(int(RETRY_S * 1e3))
        detail = any_pb2.Any()
        detail.Pack(retry)
        status = status_pb2.Status(code=self.code.value[0], message=self.text, details=[detail])
        return (
            (TRAILER_STATUS_DETAILS, status.SerializeToString()),
            (TRAILER_RETRY_PYTHON, retry.SerializeToString()),
        )

    def body(self, *, as_json: bool) -> bytes:
        """Of HTTP: a google.rpc.Status, in the encoding that the client speaks."""
        number = self.code.value[0]
        if as_json:
            return json.dumps({"code": number, "message": self.text}).encode()
        body: bytes = status_pb2.Status(code=number, message=self.text).SerializeToString()
        return body


def answer(outcome: Outcome, text: str = "") -> Answer:
    """The answer to an outcome; ``text`` says it more exactly than that does."""
    code, status, usual_text = _STATUS[outcome]
    return Answer(outcome, code, status, text or usual_text)
