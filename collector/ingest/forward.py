"""Telemetry passed on, as it came, to the backend that it is meant for.

What a receiver has acknowledged is offered here, and waits in a queue that is bounded in bytes. One task sends it in
the order in which it came, over OTLP/gRPC or OTLP/HTTP, byte for byte; of traces the scopes of ``forward_drop_scopes``
are left out, since no backend wants a thousand step events a second. With a log, an export for which there is no room
here waits there, and what was not sent at the end is sent by the next process.

    sent            the backend has taken it
    left_out        nothing of it is outside of ``forward_drop_scopes``
    refused         the backend does not want it, or a part of it (partial success), now or ever
    dropped         there was no room when it came, or no longer in the log (the oldest here are kept, in their order);
                    or the backend had not taken it when it was GIVE_UP_S old, or when the process ended, and in no log

A call that may succeed later is repeated after 1 s, then after twice as long, up to 30 s; a backend that says when to
come back (RetryInfo, Retry-After) is obeyed. Nothing here makes a receiver wait or fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import deque
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from collector.config import Config, ConfigError, Endpoint, parse_endpoint, read_file
from collector.decode import Export
from collector.runtime import Background, Clock, Health, sentence
from collector.runtime.http import open_session
from collector.telemetry import ForwardOutcome, Metrics, Signal, table

from .status import TRAILER_STATUS_DETAILS

if TYPE_CHECKING:
    from collector.service import Log

NAME: Final = "forward"
"""In health and in the log."""
QUEUE_BYTES: Final = 16 << 20
"""Bytes that may wait: at 100 kB/s of an engine's spans, nearly three minutes."""
WAITING_BYTES: Final = 256
"""Bytes of a waiting export beside its payload."""
CALL_S: Final = 10.0
"""Timeout of a call, that of an SDK's exporter."""
PAUSE_S: Final = 1.0
PAUSE_MAX_S: Final = 30.0
RETRY_AFTER_MIN_S: Final = 0.1
"""Shortest pause that a backend can ask for."""
GIVE_UP_S: Final = 300.0
BEHIND_S: Final = 0.01
"""Delay between receiver and backend, so that a waiting client gets its acknowledgement first."""
FLUSH_S: Final = 2.0
"""How long a stop sends what is left."""
METHODS: Final = {
    signal: f"/opentelemetry.proto.collector.{name}.v1.{name.capitalize()}Service/Export"
    for signal, name in ((Signal.TRACES, "trace"), (Signal.METRICS, "metrics"), (Signal.LOGS, "logs"))
}
"""Of OTLP/gRPC."""
PATHS: Final = {signal: f"/v1/{signal}" for signal in Signal}
"""Of OTLP/HTTP."""
REPLY_BYTES_MAX: Final = 1 << 16
"""What is read of a reply over HTTP."""
_CODE = grpc.StatusCode
_RETRIED: Final = {
    _CODE.CANCELLED,
    _CODE.DEADLINE_EXCEEDED,
    _CODE.ABORTED,
    _CODE.OUT_OF_RANGE,
    _CODE.UNAVAILABLE,
    _CODE.DATA_LOSS,
}
_RETRIED_HTTP: Final = {429, 502, 503, 504}
_ANY: Final = {"0.0.0.0", "::"}  # noqa: S104 -- compared, not bound
_LOCAL: Final = "127.0.0.1"

_log = logging.getLogger(__name__)


class _Waiting(NamedTuple):
    signal: Signal
    payload: bytes
    """Empty where it is in the log only."""
    spans: int
    since_ns: int
    seq: int

    @property
    def size_bytes(self) -> int:
        """What it holds here."""
        return WAITING_BYTES + len(self.payload)


class _Failure(NamedTuple):
    """A call that the backend did not take; ``pause_s`` is when it may be repeated, if it may."""

    text: str
    may_repeat: bool
    pause_s: float = 0.0


class Forwarder:
    """Sends on what it is offered, from ``start`` to ``stop``; everything happens in the loop.

    Offered = Σ outcomes + what waits, per signal, always. ``log`` has the exports with a number, and how far they were
    passed on. ConfigError where telemetry would come back to this very process, or the file of headers cannot be used.
    """

    def __init__(self, config: Config, clock: Clock, metrics: Metrics, log: Log, health: Health) -> None:
        _refuse_loop(config)
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._log = log
        self._logged: Iterator[Export] = iter(())
        self._queue: deque[_Waiting] = deque()
        self._queued_bytes = 0
        self._filled, self._emptied = asyncio.Event(), asyncio.Event()
        self._emptied.set()
        self._task = Background(NAME, health)
        self._scopes = [scope.encode() for scope in config.forward_drop_scopes]
        self._told: bool | None = None
        """Of the last failure, if there was one: whether its call may be repeated."""
        self._headers = _headers(config)
        metrics.set(table.CAPACITY_BYTES, QUEUE_BYTES, "forward")
        metrics.follow(table.SIZE_BYTES, lambda: self._queued_bytes, "forward")

    def enqueue(self, signal: Signal, payload: bytes, spans: int = 0, seq: int = 0) -> None:
        """Take what a receiver acknowledges, with its number in the log; returns at once."""
        waiting = _Waiting(signal, payload, spans, self._clock.monotonic_ns(), seq)
        if seq and self._queued_bytes + waiting.size_bytes > QUEUE_BYTES // 2:  # the other half is for numbers alone
            waiting = waiting._replace(payload=b"")
        if self._queue and self._queued_bytes + waiting.size_bytes > QUEUE_BYTES:
            self._count(waiting, ForwardOutcome.DROPPED)
            return
        self._queue.append(waiting)
        self._queued_bytes += waiting.size_bytes
        self._emptied.clear()
        self._filled.set()

    async def start(self) -> None:
        """Begin to send, with what the process before has left in the log; the backend need not be there."""
        unsent = self._log.entries(self._log.forwarded_seq + 1)
        for spans, seq in await asyncio.to_thread(lambda: [(each.spans, each.seq) for each in unsent]):
            self.enqueue(Signal.TRACES, b"", spans, seq)
        self._task.start(self._run())

    async def stop(self) -> bool:
        """Send what is left for ``FLUSH_S``; False if something was lost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._emptied.wait()
        await self._task.stop()
        lost = [waiting for waiting in self._queue if not waiting.seq]
        for waiting in lost:
            self._count(waiting, ForwardOutcome.DROPPED)
        if lost:
            _log.warning("%d exports are lost: they were not passed on before the end", len(lost))
        return not lost

    async def _run(self) -> None:
        make = _GrpcBackend if self._config.forward.startswith("grpc") else _HttpBackend
        backend = make(self._config, self._headers)
        try:
            while True:
                await self._filled.wait()
                await asyncio.sleep(BEHIND_S)
                while self._queue:
                    waiting = self._queue[0]
                    outcome = await self._pass_on(backend, waiting)
                    self._queue.popleft()
                    self._queued_bytes -= waiting.size_bytes
                    self._count(waiting, outcome)
                    if waiting.seq:
                        self._log.mark_forwarded(waiting.seq)
                self._filled.clear()
                self._emptied.set()
        finally:
            await backend.close()

    async def _pass_on(self, backend: _GrpcBackend | _HttpBackend, waiting: _Waiting) -> ForwardOutcome:
        """Send one export until the backend has taken it, does not want it, or it is too old."""
        payload: bytes | None = waiting.payload
        if waiting.seq and not payload:
            payload = await asyncio.to_thread(self._logged_payload, waiting.seq)
        if payload is None:
            return ForwardOutcome.DROPPED
        if waiting.signal is Signal.TRACES and any(scope in payload for scope in self._scopes):
            payload = await asyncio.to_thread(without_scopes, payload, frozenset(self._config.forward_drop_scopes))
        if not payload:
            return ForwardOutcome.LEFT_OUT
        pause_s = PAUSE_S
        while True:
            left_s = GIVE_UP_S - (self._clock.monotonic_ns() - waiting.since_ns) / 1e9
            if left_s < 0.0:
                return ForwardOutcome.DROPPED
            try:
                failure = await backend.send(waiting.signal, payload)
            except Exception as error:  # noqa: BLE001 -- whatever an answer makes a library raise, the next is sent
                failure = _Failure(str(error) or type(error).__name__, may_repeat=True)
            self._tell(failure)
            if failure is None:
                return ForwardOutcome.SENT
            if not failure.may_repeat:
                return ForwardOutcome.REFUSED
            asked_s = max(failure.pause_s, RETRY_AFTER_MIN_S) if failure.pause_s > 0.0 else pause_s
            await asyncio.sleep(min(asked_s, left_s))
            pause_s = min(2.0 * pause_s, PAUSE_MAX_S)

    def _logged_payload(self, seq: int) -> bytes | None:
        """Payload of a log entry; None if the entry was dropped for room.

        Numbers grow from call to call, so it is read on from where it was, and anew where that is too far or too early.
        """
        for entries in (self._logged, self._log.entries(seq)):
            self._logged = entries
            found = next((each for each in entries if each.seq >= seq), None)
            if found is not None and found.seq == seq:
                return found.payload
        return None

    def _tell(self, failure: _Failure | None) -> None:
        """Log once that the backend takes no telemetry now, or never will, and once that it does again."""
        told = failure and failure.may_repeat
        if failure is not None and told is not self._told:
            _log.warning("%s does not take telemetry: %s", self._config.forward, failure.text)
        elif failure is None and self._told is not None:
            _log.info("%s takes telemetry again", self._config.forward)
        self._told = told

    def _count(self, waiting: _Waiting, outcome: ForwardOutcome) -> None:
        self._metrics.add(table.FORWARDED, 1, waiting.signal, outcome)
        if waiting.spans:
            self._metrics.add(table.FORWARDED_SPANS, waiting.spans, outcome)


def without_scopes(payload: bytes, scopes: frozenset[str]) -> bytes:
    """An ExportTraceServiceRequest without the spans of some scopes; empty if nothing is left.

    Where it has no such scope it is the very same bytes, whatever a newer protocol or another writer made of them.
    """
    try:
        request = ExportTraceServiceRequest.FromString(payload)
    except DecodeError:
        return payload
    whole = True
    for resource in list(request.resource_spans):
        kept = [each for each in resource.scope_spans if each.scope.name not in scopes]
        if len(kept) == len(resource.scope_spans):
            continue
        whole = False
        if kept:
            del resource.scope_spans[:]
            resource.scope_spans.extend(kept)
        else:
            request.resource_spans.remove(resource)
    return payload if whole else request.SerializeToString()


def _refuse_loop(config: Config) -> None:
    target = _address(config)
    for own in map(parse_endpoint, filter(None, (config.listen, config.listen_http))):
        if target.port == own.port and _is_reached(target.address, own.address):
            raise ConfigError("forward", f"{config.forward} is where this sidecar itself receives")


def _is_reached(host: str, own: str) -> bool:
    """Whether who calls a host, in lower case, reaches an address that is listened to here; names are not looked up."""
    called, own = (_LOCAL if name == "localhost" else name for name in (host, own))
    return called in {own, *_ANY} or (own in _ANY and (called == socket.gethostname().lower() or _is_ours(called)))


def _is_ours(address: str) -> bool:
    """Whether it is an address of this machine: that of another cannot be bound, and a name is none."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
            probe.bind(found[0][4])
    except OSError:
        return False
    return True


_PORTS = {"grpc": 4317, "grpcs": 4317, "http": 80, "https": 443}
"""Where telemetry goes where no port is named."""


def _address(config: Config) -> Endpoint:
    try:
        parts = urlsplit(config.forward)
    except ValueError as error:  # brackets around what is no IPv6 address
        raise ConfigError("forward", str(error)) from None
    return Endpoint(parts.hostname or "", parts.port or _PORTS[parts.scheme])


def _headers(config: Config) -> dict[str, str]:
    """Of each call: lines ``name: value`` of a file, which may be a mounted secret."""
    if not config.forward_headers_file:
        return {}
    try:
        lines = read_file(Path(config.forward_headers_file)).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("forward_headers_file", f"{config.forward_headers_file}: {sentence(error)}") from None
    pairs = [line.partition(":") for line in lines if line.strip()]
    if not all(colon for _, colon, _ in pairs):
        raise ConfigError("forward_headers_file", f"{config.forward_headers_file}: expected lines 'name: value'")
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


class _GrpcBackend:
    """OTLP/gRPC on raw bytes; made in the loop."""

    def __init__(self, config: Config, headers: Mapping[str, str]) -> None:
        self._metadata = tuple(headers.items())
        target = str(_address(config))
        options = [("grpc.max_reconnect_backoff_ms", int(PAUSE_MAX_S * 1000))]
        if config.forward.startswith("grpcs"):
            roots = Path(config.ca_file).read_bytes() if config.ca_file else None  # the scraper has looked at it
            self._channel = grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(roots), options)
        else:
            self._channel = grpc.aio.insecure_channel(target, options)

    async def send(self, signal: Signal, payload: bytes) -> _Failure | None:
        try:
            call: Any = self._channel.unary_unary(METHODS[signal])  # bytes in, bytes out
            return _rejected(await call(payload, timeout=CALL_S, metadata=self._metadata))
        except grpc.aio.AioRpcError as error:
            pause_s = _retry_after_s(error)
            may_repeat = error.code() in _RETRIED or (error.code() is _CODE.RESOURCE_EXHAUSTED and pause_s > 0.0)
            return _Failure(f"{error.code().name} {error.details()}", may_repeat, pause_s)

    async def close(self) -> None:
        await self._channel.close()


def _rejected(reply: bytes) -> _Failure | None:
    """What a backend that took an export has left out of it; replies to metrics and logs look the same."""
    with contextlib.suppress(DecodeError):
        partial = ExportTraceServiceResponse.FromString(reply).partial_success
        if partial.rejected_spans:
            return _Failure(f"{partial.rejected_spans} rejected, {partial.error_message}", may_repeat=False)
    return None


def _retry_after_s(error: grpc.aio.AioRpcError) -> float:
    """When the backend wants to be asked again: OTLP puts it among the details of the status."""
    retry = error_details_pb2.RetryInfo()
    with contextlib.suppress(DecodeError):
        for key, value in error.trailing_metadata() or ():
            if key == TRAILER_STATUS_DETAILS and isinstance(value, bytes):
                for detail in status_pb2.Status.FromString(value).details:
                    detail.Unpack(retry)
    return float(retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9)


class _HttpBackend:
    """OTLP/HTTP with protobuf."""

    def __init__(self, config: Config, headers: Mapping[str, str]) -> None:
        self._base = config.forward.rstrip("/")
        tls = ssl.create_default_context(cafile=config.ca_file or None)
        self._session = open_session(tls, {**headers, "Content-Type": "application/x-protobuf"}, CALL_S)

    async def send(self, signal: Signal, payload: bytes) -> _Failure | None:
        async with self._session.post(self._base + PATHS[signal], data=payload, allow_redirects=False) as answer:
            if answer.status // 100 == HTTPStatus.OK // 100:
                try:
                    return _rejected(await answer.content.readexactly(REPLY_BYTES_MAX))
                except asyncio.IncompleteReadError as whole:
                    return _rejected(whole.partial)
            asked = answer.headers.get("Retry-After", "")
            pause_s = float(asked) if asked.isascii() and asked.isdigit() else 0.0
            return _Failure(f"status {answer.status}", answer.status in _RETRIED_HTTP, pause_s)

    async def close(self) -> None:
        await self._session.close()
