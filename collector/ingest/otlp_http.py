"""OTLP/HTTP on aiohttp: POST /v1/traces with protobuf or JSON, plain or gzip.

* A body is read against the budget that all transports share, so that a declared length costs nothing; it has the time
  of the budget to come.
* gzip is inflated in a thread, up to the size limit of a plain body. A body has one member, as exporters make it.
* JSON becomes protobuf, in a thread, before anything else looks at it. What is in it is counted before it is parsed,
  and one body is parsed at a time: as many values as are allowed take two seconds and 70 MB.
* There is no keep-alive after an answer that left a body unread.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from functools import partial
from http import HTTPStatus
from typing import Final

from aiohttp import web
from grpc import StatusCode
from multidict import CIMultiDict

from collector.config import Config, parse_endpoint
from collector.decode import SMALL_BYTES, has_too_many_values, json_to_protobuf
from collector.runtime.http import HttpServer
from collector.telemetry import Outcome, Signal, Transport

from .access import TlsFiles
from .budget import Receiving
from .consumer import ExportConsumer
from .forward import PATHS
from .status import RETRY_S, Answer, answer

PATH: Final = PATHS[Signal.TRACES]
_SIGNALS: Final = {path: signal for signal, path in PATHS.items()}
CONTENT_TYPE: Final = "application/x-protobuf"
JSON: Final = "application/json"


_UNSERVED, _BAD, _KIND = StatusCode.UNIMPLEMENTED, StatusCode.INVALID_ARGUMENT, HTTPStatus.UNSUPPORTED_MEDIA_TYPE
NOT_FOUND = Answer(Outcome.UNDECODABLE, _UNSERVED, HTTPStatus.NOT_FOUND, f"only {PATH} is served")
NOT_POST = Answer(Outcome.UNDECODABLE, _UNSERVED, HTTPStatus.METHOD_NOT_ALLOWED, "POST only")
NOT_OTLP = Answer(Outcome.UNDECODABLE, _BAD, _KIND, f"expected {CONTENT_TYPE} or, of traces, {JSON}; gzip or plain")
NO_LENGTH = Answer(Outcome.UNDECODABLE, _BAD, HTTPStatus.LENGTH_REQUIRED, "expected a Content-Length")
TOO_LARGE, TOO_SLOW = answer(Outcome.TOO_LARGE), answer(Outcome.INCOMPLETE)
NOT_GZIP = answer(Outcome.UNDECODABLE, text="not gzip of one member")
BUSY = answer(Outcome.QUEUE_FULL, "JSON of others is being parsed")
NOT_JSON = answer(Outcome.UNDECODABLE, text="not OTLP/JSON")
_HEADERS: Final = {
    HTTPStatus.METHOD_NOT_ALLOWED: ("Allow", "POST"),
    HTTPStatus.UNAUTHORIZED: ("WWW-Authenticate", "Bearer"),
    _KIND: ("Accept-Encoding", "gzip"),
}
"""What belongs to an answer of a status."""


def inflate(data: bytes, limit_bytes: int) -> bytes | Answer:
    """Gunzip one member of at most so many bytes, or say why it cannot be taken."""
    member = zlib.decompressobj(wbits=31)
    try:
        out = member.decompress(data, limit_bytes + 1)
    except zlib.error:
        return NOT_GZIP
    if len(out) > limit_bytes:
        return TOO_LARGE
    return out if member.eof and not member.unused_data else NOT_GZIP


def _protobuf_of(text: bytes) -> bytes | Answer:
    """Protobuf out of JSON, or why it cannot be taken."""
    if has_too_many_values(text):
        return TOO_LARGE
    try:
        return json_to_protobuf(text)
    except ValueError:
        return NOT_JSON


class _ExportHandler:
    """Answers the requests of one endpoint; in the loop."""

    def __init__(self, consumer: ExportConsumer) -> None:
        self._consumer = consumer
        self._parsing = asyncio.Lock()

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """Look at the head, have the body read and taken in, and answer."""
        rejected = self._check_head(request)
        if rejected is not None:
            self._consumer.count_call(Transport.HTTP, rejected.outcome)
            return _reply(request, rejected)
        signal, size_bytes = _SIGNALS[request.path], request.content_length or 0
        if _encoding(request) == "gzip":
            size_bytes += self._consumer.message_bytes_max  # what comes out is not known before
        read = partial(self._read, request)
        return _reply(request, await self._consumer.receive(signal, Transport.HTTP, _peer(request), size_bytes, read))

    def _check_head(self, request: web.BaseRequest) -> Answer | None:  # noqa: PLR0911 -- one per rejection
        headers, size_bytes = request.headers, request.content_length
        signal = _SIGNALS.get(request.path)
        if signal is None or not (signal is Signal.TRACES or self._consumer.can_forward):
            return NOT_FOUND
        if request.method != "POST":
            return NOT_POST
        if not self._consumer.lets_in(headers.get("Authorization")):
            return answer(Outcome.UNAUTHENTICATED)
        known = (CONTENT_TYPE, JSON) if signal is Signal.TRACES else (CONTENT_TYPE,)
        if request.content_type not in known or _encoding(request) not in ("", "identity", "gzip"):
            return NOT_OTLP
        if "Transfer-Encoding" in headers or size_bytes is None:
            return NO_LENGTH
        if size_bytes > self._consumer.message_bytes_max:
            return TOO_LARGE
        return None

    async def _read(self, request: web.BaseRequest, receiving: Receiving) -> bytes | Answer:
        """The body as protobuf, or why it is none."""
        try:
            received = await receiving.read(request.content.read())
        except (web.RequestPayloadError, RuntimeError):  # the latter: the connection was closed before it was read
            return TOO_SLOW
        body: bytes | Answer = received
        if _encoding(request) == "gzip":
            body = await asyncio.to_thread(inflate, received, self._consumer.message_bytes_max)
        if request.content_type != JSON or isinstance(body, Answer):
            return body
        if len(body) > SMALL_BYTES and self._parsing.locked():
            return BUSY  # many large ones that wait would hold the room of others
        async with self._parsing:
            return await asyncio.to_thread(_protobuf_of, body)


def _reply(request: web.BaseRequest, answer: Answer | None) -> web.Response:
    as_json = request.content_type == JSON
    headers = CIMultiDict([("Content-Type", JSON if as_json else CONTENT_TYPE)])
    if answer is None:
        return web.Response(body=b"{}" if as_json else b"", headers=headers)
    headers.extend([_HEADERS[answer.status]] if answer.status in _HEADERS else [])
    if answer.may_repeat:
        headers["Retry-After"] = str(math.ceil(RETRY_S))
    response = web.Response(status=answer.status, body=answer.body(as_json=as_json), headers=headers)
    if not request.content.at_eof():
        response.force_close()  # what is left of the body shall not be taken for a request
    return response


def _peer(request: web.BaseRequest) -> str:
    address = request.transport.get_extra_info("peername") if request.transport is not None else None
    return f"http:{address[0]}:{address[1]}" if address else "http:unknown:0"


def _encoding(request: web.BaseRequest) -> str:
    return request.headers.get("Content-Encoding", "").strip().lower()


def make_http_receiver(
    config: Config,
    consumer: ExportConsumer,
    *,
    stop_timeout_s: float,
    tls: TlsFiles | None = None,
) -> HttpServer:
    """A receiver on one endpoint."""
    handle, context = _ExportHandler(consumer).handle, tls.context() if tls is not None else None
    endpoint, purpose = parse_endpoint(config.listen_http), ("OTLP/HTTP", "listen_http")
    return HttpServer(endpoint, handle, purpose, stop_timeout_s=stop_timeout_s, tls=context)
