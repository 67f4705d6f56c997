"""OTLP/gRPC export calls with retries, on the exporter's thread.

Retried are the codes of the OTLP specification; the same bytes go again, so that a receiver knows a repetition by its
span ids. The receiver's RetryInfo is honoured (trailer ``google.rpc.retryinfo-bin``), else the pause doubles from
0.25 s to 5 s. After ``GIVE_UP_S`` a chunk is given up: the queue behind it is bounded, newer events are worth more.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, Final

from . import __version__
from .log import LOG
from .settings import Settings

METHOD: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
RETRIED: Final = frozenset(
    {"CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"}
)
FIRST_PAUSE_S: Final = 0.25
LAST_PAUSE_S: Final = 5.0
GIVE_UP_S: Final = 90.0
_FORK_SUPPORT: Final = "GRPC_ENABLE_FORK_SUPPORT"
LOOPBACK: Final = ("127.", "localhost:", "[::1]")


def _import_grpc() -> Any:
    """Import it (0.2 s: in the exporter's thread), without the threads that its core starts anew in a forked child.

    They crash a child that was forked while a call was under way (grpc/grpc, doc/fork_support.md). Who chose
    ``GRPC_ENABLE_FORK_SUPPORT`` keeps that.
    """
    chosen = _FORK_SUPPORT in os.environ
    if not chosen:
        os.environ[_FORK_SUPPORT] = "0"
    try:
        import grpc  # noqa: PLC0415
    finally:
        if not chosen:
            del os.environ[_FORK_SUPPORT]
    return grpc


class Sender:
    """A connection to the receiver."""

    def __init__(self, settings: Settings) -> None:
        grpc = _import_grpc()
        self._timeout_s = settings.timeout_s
        self._headers = settings.headers
        self._error: type[Exception] = grpc.RpcError
        options: list[tuple[str, Any]] = [
            ("grpc.primary_user_agent", f"tracefit-vllm/{__version__}"),
            ("grpc.initial_reconnect_backoff_ms", 250),
            ("grpc.max_reconnect_backoff_ms", 2000),  # the default of 120 s would outlast a sidecar's restart
            # Several schedulers of one process must not share a connection: an engine may be known by its peer.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if settings.target.startswith(LOOPBACK):
            options.append(("grpc.enable_http_proxy", 0))
        gzip = grpc.Compression.Gzip if settings.gzip else grpc.Compression.NoCompression
        if settings.secure:
            roots = Path(settings.certificate).read_bytes() if settings.certificate else None
            credentials = grpc.ssl_channel_credentials(root_certificates=roots)
            self._channel = grpc.secure_channel(settings.target, credentials, options, gzip)
        else:
            self._channel = grpc.insecure_channel(settings.target, options, gzip)
        self._export: Any = self._channel.unary_unary(METHOD)  # bytes in, bytes out
        self._pid = os.getpid()
        self._target = settings.target
        self._warned = False

    def send(self, request: bytes, patience: threading.Event | None) -> bool:
        """Send one request.

        Args:
            request: a serialised ExportTraceServiceRequest.
            patience: retries go on until this is set; None means no retries and a short deadline.
        """
        give_up = time.monotonic() + GIVE_UP_S
        pause_s = FIRST_PAUSE_S
        timeout_s = self._timeout_s if patience else min(self._timeout_s, 0.5)
        while True:
            try:
                self._export(request, timeout=timeout_s, metadata=self._headers)
            except self._error as error:
                code, asked_s = _outcome(error)
                self._warn(code)
                if patience is None or code not in RETRIED or time.monotonic() > give_up:
                    return False
            except ValueError:  # the channel was closed meanwhile: the engine is stopping
                return False
            else:
                return True
            if patience.wait(min(asked_s or pause_s, LAST_PAUSE_S)):
                patience = None  # stopping: one last try, briefly
                timeout_s = min(timeout_s, 0.5)
            pause_s = min(pause_s * 2, LAST_PAUSE_S)

    def _warn(self, code: str) -> None:
        if not self._warned:
            self._warned = True
            LOG.warning(
                "tracefit: %s does not take telemetry (%s); said once, serving is not affected", self._target, code
            )

    def close(self) -> None:
        """Close the connection; a call in flight is cancelled."""
        if self._pid == os.getpid():
            self._channel.close()


def _outcome(error: Any) -> tuple[str, float]:
    """Return the status code's name and the pause the receiver asks for, 0 if none."""
    code = error.code()
    for key, value in error.trailing_metadata() or ():
        if key == "google.rpc.retryinfo-bin":
            return code.name, retry_delay_s(value)
    return code.name, 0.0


def retry_delay_s(message: bytes) -> float:
    """Read a serialised google.rpc.RetryInfo: field 1 is a Duration of seconds (1) and nanos (2); 0 if unreadable.

    By hand: the generated class would be one more dependency for two numbers.
    """
    try:
        duration = _fields(message)[1]
        assert isinstance(duration, bytes)  # noqa: S101
        parts = _fields(duration)
        seconds, nanos = parts.get(1, 0), parts.get(2, 0)
        return float(seconds) + float(nanos) / 1e9 if not isinstance(seconds, bytes | type(None)) else 0.0
    except (AssertionError, IndexError, KeyError, TypeError, ValueError):
        return 0.0


def _fields(message: bytes) -> dict[int, Any]:
    """Return a message's varint and length-delimited fields by number."""
    found: dict[int, Any] = {}
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        number, at = _read_varint(message, at)
        if tag & 7 == 2:  # noqa: PLR2004 length-delimited
            found[tag >> 3], at = message[at : at + number], at + number
        elif tag & 7 == 0:
            found[tag >> 3] = number
        else:
            raise ValueError("neither varint nor length-delimited")
    return found


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = message[at]
        at += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:  # noqa: PLR2004
            return number, at
