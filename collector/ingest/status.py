"""The one place where an outcome becomes a status that a client sees.

| outcome | gRPC | HTTP | retried by a client |
|---|---|---|---|
| accepted, or empty | OK | 200 | |
| queue or log full or broken, memory short | RESOURCE_EXHAUSTED + RetryInfo | 503 + Retry-After | after the hint |
| shutting down | UNAVAILABLE | 503 | yes, on a new connection |
| undecodable, too many spans or fields | INVALID_ARGUMENT | 400 | no |
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
import math
from http import HTTPStatus
from typing import NamedTuple

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from collector.telemetry import Outcome

from .queue import Refused

TRAILER_RETRY_PYTHON = "google.rpc.retryinfo-bin"
TRAILER_STATUS_DETAILS = "grpc-status-details-bin"


class Answer(NamedTuple):
    """How a refused or failed call ends."""

    code: grpc.StatusCode
    text: str
    trailers: tuple[tuple[str, bytes], ...] = ()


INTERNAL = Answer(grpc.StatusCode.INTERNAL, "internal error")
UNAUTHENTICATED = Answer(grpc.StatusCode.UNAUTHENTICATED, "a bearer token is needed")
INCOMPLETE = Answer(grpc.StatusCode.INVALID_ARGUMENT, "the call ended without its message")

_REFUSALS = {
    Outcome.QUEUE_FULL: (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full"),
    Outcome.SHUTTING_DOWN: (grpc.StatusCode.UNAVAILABLE, "shutting down"),
    Outcome.UNDECODABLE: (grpc.StatusCode.INVALID_ARGUMENT, "not an ExportTraceServiceRequest"),
    Outcome.TOO_MANY_SPANS: (grpc.StatusCode.INVALID_ARGUMENT, "too many spans in one export"),
    Outcome.TOO_MANY_FIELDS: (grpc.StatusCode.INVALID_ARGUMENT, "too many fields in one export"),
    Outcome.MEMORY: (grpc.StatusCode.RESOURCE_EXHAUSTED, "memory limit"),
    Outcome.LOG_FULL: (grpc.StatusCode.RESOURCE_EXHAUSTED, "log full"),
    Outcome.LOG_FAILED: (grpc.StatusCode.RESOURCE_EXHAUSTED, "log cannot be written"),
}
_RETRIED = frozenset({Outcome.QUEUE_FULL, Outcome.MEMORY, Outcome.LOG_FULL, Outcome.LOG_FAILED})
_HTTP = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
}


def answer(refused: Refused, text: str = "") -> Answer:
    """The gRPC status of a refusal; ``text`` says it more exactly than the outcome does."""
    code, usual_text = _REFUSALS[refused.reason]
    text = text or usual_text
    if refused.reason not in _RETRIED:
        return Answer(code, text)
    seconds, nanos = divmod(int(refused.retry_after_s * 1e9), 1_000_000_000)
    retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds, nanos=nanos))
    detail = any_pb2.Any()
    detail.Pack(retry)
    status = status_pb2.Status(code=code.value[0], message=text, details=[detail])
    return Answer(
        code,
        text,
        ((TRAILER_STATUS_DETAILS, status.SerializeToString()), (TRAILER_RETRY_PYTHON, retry.SerializeToString())),
    )


class HttpAnswer(NamedTuple):
    """How a request ends."""

    status: HTTPStatus
    code: grpc.StatusCode
    text: str = ""
    retry_after_s: int = 0

    def body(self, *, as_json: bool) -> bytes:
        """An empty response if it went well, else a google.rpc.Status, in the encoding that the client speaks."""
        if self.code is grpc.StatusCode.OK:
            return b"{}" if as_json else b""
        number = self.code.value[0]
        if as_json:
            return json.dumps({"code": number, "message": self.text}).encode()
        body: bytes = status_pb2.Status(code=number, message=self.text).SerializeToString()
        return body


def http_answer(refused: Refused) -> HttpAnswer:
    """The HTTP status of a refusal."""
    code, text = _REFUSALS[refused.reason]
    retry_after_s = math.ceil(refused.retry_after_s) if refused.reason in _RETRIED else 0
    return HttpAnswer(_HTTP[code], code, text, retry_after_s)
