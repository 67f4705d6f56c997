"""A snapshot: where it comes from, and its configurations.

A server may hang, drip or never stop sending: :func:`load` shuts the socket after ``timeout_s``, for a socket's own
timeout begins anew with every byte, and holds at most 64 MiB. Proxies of the environment are not asked: a sidecar is in
the cluster. Redirects are not followed, so that a token reaches no other host than the one it was given for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from .changes import Diff, compared
from .configured import Config
from .document import parse
from .exceptions import LoadError, checked
from .selection import Identity, find_config, names_of

if TYPE_CHECKING:
    from socket import socket as Socket  # noqa: N812
    from threading import Event

BYTES_MAX = 64 * 2**20
_CHUNK_BYTES = 2**16
_OK = 200
_REFUSALS = {
    401: "wants a token (token=…)",
    403: "refuses this token",
    404: "has no snapshot there (its path is /snapshot)",
    503: "has learned nothing yet; try again when it has seen load",
}


class Snapshot:
    """What was learned at one moment; see :func:`load`.

    Attributes:
        generation, created_unix_nano, tracefit_version: of the document.
        configs: every configuration in it.
        data: the document as it came, to keep as a file.
    """

    def __init__(self, data: bytes, where: str) -> None:
        self.generation, self.created_unix_nano, self.tracefit_version, self._described = parse(data, where)
        self._is_of_a_sidecar = is_url(where)
        self._identities = [
            Identity(each.config_id, each.facts, each.last_heard_unix_nano, each.replaced) for each in self._described
        ]
        names = names_of(self._identities)
        self.configs: tuple[Config, ...] = tuple(
            Config(described, name=name) for described, name in zip(self._described, names, strict=True)
        )
        self.data = data

    def __repr__(self) -> str:
        noun = "configuration" if len(self.configs) == 1 else "configurations"
        return f"<tracefit.Snapshot generation {self.generation}, {len(self.configs)} {noun}>"

    @property
    def as_of_unix_nano(self) -> int:
        """What ages are counted to: of one that a sidecar answered, now; of a file, when it was made."""
        return time.time_ns() if self._is_of_a_sidecar else self.created_unix_nano

    def config(self, config_id: str = "", *, model: str = "", gpu: str = "") -> Config:
        """The only configuration that fits; where several do, the only one of them whose engine is alive.

        One is alive unless its server sends another configuration now, or another one that fits was heard of more than
        ten minutes later.

        Args:
            config_id: the whole, the beginning, or what people call it, like ``llama h100``, ``8B · H100 · TP 2`` or
                words of its ``name``.
            model: a part of the name is enough, in any case of letters.
            gpu: the same.

        Raises:
            NotFoundError: none fits, or several that are alive; it lists them.
        """
        return self.configs[find_config(self._identities, config_id, model=model, gpu=gpu)]

    def diff(self, other: Snapshot) -> Diff:
        """What changed from this one to ``other``; see :class:`Diff`."""
        return compared(self._described, other._described)


def load(source: str | bytes | os.PathLike[str], *, token: str | None = None, timeout_s: float = 10.0) -> Snapshot:
    """A snapshot from a file, a URL or bytes.

    Args:
        source: a path, an http(s) URL (``http://host:9464`` means its ``/snapshot``), or the document itself.
        token: sent as a bearer token, to that host only.
        timeout_s: for the whole answer of a URL.

    Raises:
        LoadError: one sentence: not there, too slow, too big, a page for people, another schema, …
    """
    timeout_s = checked("timeout_s", timeout_s, 1e-3, 3600.0)
    if token is not None and not (isinstance(token, str) and token.isascii() and token.isprintable()):
        raise LoadError("the token has characters that no header can hold")
    if isinstance(source, (bytes, bytearray, memoryview)):
        data, where = bytes(source), "this"
    elif where := os.fspath(source):
        data = fetch(where, token, timeout_s) if is_url(where) else read_file(where)
    else:
        raise LoadError("a snapshot is read from a path, a URL or bytes, and this is an empty text")
    if len(data) > BYTES_MAX:
        raise LoadError(f"{where} is larger than {BYTES_MAX >> 20} MiB, which no snapshot is")
    return Snapshot(data, where)


# ------------------------------------------------------------------- bytes from a path or a URL


def is_url(source: str) -> bool:
    """Whether a string names something to ask, be it of a kind that cannot be asked."""
    scheme, colon, _ = source.partition("://")
    return bool(colon) and scheme.isalnum()


def read_file(path: str) -> bytes:
    """A snapshot file, or the beginning of one that is too large."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - pathlib costs a third of the import budget
            return file.read(BYTES_MAX + 1)
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise LoadError(f"cannot read {path!r}: {error}") from None


def fetch(url: str, token: str | None, timeout_s: float) -> bytes:
    """A snapshot over HTTP, or the beginning of one that is too large.

    Raises:
        LoadError: with one sentence that names the URL and what it did.
    """
    from http.client import HTTPConnection, HTTPException, HTTPSConnection  # noqa: PLC0415 - files need no network
    from threading import Event  # noqa: PLC0415

    scheme, host, port, path = _parts(url)
    make = HTTPSConnection if scheme == "https" else HTTPConnection
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    connection, is_over, data = make(host, port, timeout=timeout_s), Event(), bytearray()
    try:
        connection.connect()
        with _shut_after(timeout_s, connection.sock, is_over):
            connection.request("GET", path, headers=headers)
            with connection.getresponse() as response:
                if response.status != _OK:
                    raise LoadError(f"{url} {_REFUSALS.get(response.status, f'answers with status {response.status}')}")
                while len(data) <= BYTES_MAX and (chunk := response.read1(_CHUNK_BYTES)):
                    data += chunk
        if is_over.is_set():  # a shut socket looks like the end of the answer
            raise TimeoutError
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, TimeoutError) or is_over.is_set():
            raise LoadError(f"{url} did not answer within {timeout_s:.3g} s") from None
        said = error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)
        raise LoadError(f"{url} cannot be asked: {said}") from None
    finally:
        connection.close()
    return bytes(data)


@contextmanager
def _shut_after(timeout_s: float, socket: Socket, is_over: Event) -> Iterator[None]:
    """Ends what is read of the socket when the time is over."""
    from threading import Timer  # noqa: PLC0415

    def shut() -> None:
        is_over.set()
        with suppress(OSError):
            socket.shutdown(2)  # both ways

    timer = Timer(timeout_s, shut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _parts(url: str) -> tuple[str, str, int, str]:
    """Scheme, host, port and what to ask for; /snapshot where only a host is named."""
    from urllib.parse import urlsplit  # noqa: PLC0415

    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        host = parts.hostname or ""
    except ValueError as error:
        raise LoadError(f"{url!r} is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or any(c <= " " for c in url):
        raise LoadError(f"{url!r} is no http:// or https:// URL")
    path = parts.path if parts.path not in ("", "/") else "/snapshot"
    return parts.scheme, host, port, path + (f"?{parts.query}" if parts.query else "")
