"""The one place where an outcome becomes a status that a client sees.

| outcome | gRPC | retried by a client |
|---|---|---|
| accepted, or empty | OK | |
| queue full | RESOURCE_EXHAUSTED + RetryInfo | after the hint |
| shutting down | UNAVAILABLE | yes, on a new connection |
| undecodable, too many spans | INVALID_ARGUMENT | no |
| our own fault | INTERNAL, text constant | no |

RESOURCE_EXHAUSTED rather than UNAVAILABLE for a full queue: on UNAVAILABLE the Python exporter also rebuilds its
channel. RetryInfo goes out twice, because that exporter reads only the trailer ``google.rpc.retryinfo-bin``
(1.26 to 1.45), while the OTLP specification puts it into ``grpc-status-details-bin``.
"""

from __future__ import annotations

from typing import NamedTuple

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from .admission import Refusal, Refused

TRAILER_RETRY_PYTHON = "google.rpc.retryinfo-bin"
TRAILER_STATUS_DETAILS = "grpc-status-details-bin"


class Answer(NamedTuple):
    """How a refused or failed call ends."""

    code: grpc.StatusCode
    text: str
    trailers: tuple[tuple[str, bytes], ...] = ()


INTERNAL = Answer(grpc.StatusCode.INTERNAL, "internal error")

_REFUSALS = {
    Refusal.QUEUE_FULL: (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full"),
    Refusal.SHUTTING_DOWN: (grpc.StatusCode.UNAVAILABLE, "shutting down"),
    Refusal.UNDECODABLE: (grpc.StatusCode.INVALID_ARGUMENT, "not an ExportTraceServiceRequest"),
    Refusal.TOO_MANY_SPANS: (grpc.StatusCode.INVALID_ARGUMENT, "too many spans in one export"),
}


def answer(refused: Refused) -> Answer:
    """The gRPC status of a refusal."""
    code, text = _REFUSALS[refused.reason]
    if refused.reason is not Refusal.QUEUE_FULL:
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
