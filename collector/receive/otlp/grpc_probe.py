r"""A call to our own gRPC server as a client makes it: the one proof that all of it works.

    connect ─► SETTINGS, HEADERS, DATA ─► listener ─► HTTP/2 ─► completion queue ─► a handler's thread ─► SERVING

The call is ``grpc.health.v1.Health/Check`` of the whole server, written out in bytes (RFC 9113; RFC 7541 without its
tables; gRPC over HTTP/2). A client channel of grpcio would do, but it brings threads and a connection that stays, and
cannot do without checking a certificate, which is none of our business here: an expired one is no reason to restart.

A server that closes the connection (all places taken, or it wants a client certificate) shows that its listener lives
and nothing about the threads behind it.
"""

from __future__ import annotations

import enum
import socket
import ssl

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0x0, 0x1, 0x4
_END_STREAM, _END_HEADERS = 0x1, 0x4
_STREAM = 1
_FRAME_HEAD_BYTES = 9
_FRAMES_MAX = 32
"""Of an answer: it has five, or six with a PING."""
_SERVING_MESSAGE = b"\0\0\0\0\x02\x08\x01"
"""Uncompressed, 2 bytes: HealthCheckResponse{status: SERVING}."""
_LOOPBACK = {"0.0.0.0": ("127.0.0.1",), "::": ("::1", "127.0.0.1"), "": ("127.0.0.1",)}  # noqa: S104 -- compared, not bound


class Answer(enum.Enum):
    """What came back."""

    SERVING = "serving"
    CLOSED = "closed"
    SILENT = "silent"


def call_health(address: str, port: int, *, tls: bool, timeout_s: float) -> Answer:
    """One call on a connection of its own; blocks for at most some multiples of ``timeout_s``, mostly a millisecond."""
    for each in _LOOPBACK.get(address, (address,)):
        try:
            plain = socket.create_connection((each, port), timeout_s)
        except OSError:  # nobody listens, or we have no descriptor left: clients fare no better
            continue
        with plain:
            return _ask(plain, tls=tls)
    return Answer.SILENT


def _ask(plain: socket.socket, *, tls: bool) -> Answer:
    try:
        with _wrapped(plain) if tls else plain as connection:
            connection.sendall(_request("https" if tls else "http"))
            return _answer(connection)
    except TimeoutError:
        return Answer.SILENT
    except (OSError, EOFError):  # reset, an alert of TLS, or just the end
        return Answer.CLOSED


def _wrapped(connection: socket.socket) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # it is our own server and hears no secret
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(connection)


def _request(scheme: str) -> bytes:
    """Preface, empty SETTINGS, the head and the body of the call."""
    head = b"\x83" + (b"\x87" if scheme == "https" else b"\x86")  # :method POST, :scheme
    head += b"\x04" + _text(b"/grpc.health.v1.Health/Check") + b"\x01" + _text(b"localhost")  # :path, :authority
    head += b"\x00" + _text(b"te") + _text(b"trailers") + b"\x0f\x10" + _text(b"application/grpc")  # content-type
    empty_message = b"\0\0\0\0\0"
    return b"".join(
        (
            _PREFACE,
            _frame(_SETTINGS, 0, 0, b""),
            _frame(_HEADERS, _END_HEADERS, _STREAM, head),
            _frame(_DATA, _END_STREAM, _STREAM, empty_message),
        )
    )


def _text(value: bytes) -> bytes:
    return bytes((len(value),)) + value


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _answer(connection: socket.socket) -> Answer:
    with connection.makefile("rb") as stream:
        for _ in range(_FRAMES_MAX):
            head = stream.read(_FRAME_HEAD_BYTES)
            if len(head) < _FRAME_HEAD_BYTES:
                raise EOFError
            payload = stream.read(int.from_bytes(head[:3], "big"))
            if head[3] == _DATA:
                return Answer.SERVING if payload == _SERVING_MESSAGE else Answer.SILENT
            if head[3] == _HEADERS and head[4] & _END_STREAM:
                return Answer.SILENT  # trailers only: an error instead of a message
    return Answer.SILENT
