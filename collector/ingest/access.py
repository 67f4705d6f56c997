"""Who may send: bearer tokens and TLS, both read again while the process runs.

Files are read again when they are asked for, once a second at most (a mounted Secret is swapped whole).

**Tokens** are in a file, one per line, so that an old and a new one can hold side by side. While it cannot be read or
holds no token the last good tokens stay in force. Tokens are compared in constant time, by their digests, and never
logged.

**TLS** has certificate, key and client CA in files. A new pair takes effect at the next handshake; connections that
stand keep theirs. A pair that does not load (half written, key of another certificate) is refused and the former one
stays. Expiry is the client's verdict: an expired certificate fails handshakes until it is replaced, and nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import grpc

from collector.config import Config, ConfigError, read_file
from collector.runtime import Clock, sentence

READ_EVERY_NS = 1_000_000_000
TOKEN_BYTES_MIN = 16

T = TypeVar("T")

_log = logging.getLogger(__name__)


class WatchedFiles(Generic[T]):
    """What some files hold, read again once a second at most; what they held before stays while that fails.

    ``named`` is what they are and ``path`` the first of them, in the log; ``key`` names them in a ConfigError. ``load``
    raises OSError or ValueError if they cannot be used.
    """

    def __init__(self, named: str, path: str, load: Callable[[], T], key: str, clock: Clock) -> None:
        self._named = named
        self._path = path
        self._load = load
        self._clock = clock
        self._read_ns = clock.monotonic_ns()
        try:
            self._held = load()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(key, f"{getattr(error, 'filename', None) or path}: {sentence(error)}") from None

    def newest(self) -> T:
        """The newest that could be read; from any thread, of which two at once may read it twice."""
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._read_ns >= READ_EVERY_NS:
            self._read_ns = now_ns
            try:
                self._held = self._load()
            except (OSError, ValueError) as error:
                text = "%s %s cannot be used (%s); what it held before stays in force"
                _log.warning(text, self._named, self._path, error)
        return self._held


class TokenFile:
    """The tokens of one file; ``key`` names the configuration key in errors."""

    def __init__(self, path: str, key: str, clock: Clock) -> None:
        self._path = path
        self._digests = WatchedFiles("token file", path, self._load, key, clock)

    def accepts(self, authorization: str | None) -> bool:
        """Whether an ``Authorization`` header bears one of the tokens."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            return False
        digest = _digest(token.strip().encode("utf-8", "backslashreplace"))
        return any([hmac.compare_digest(digest, known) for known in self._digests.newest()])  # noqa: C419 -- look at all

    def _load(self) -> tuple[bytes, ...]:
        tokens = read_file(Path(self._path)).split()
        if not tokens or min(map(len, tokens)) < TOKEN_BYTES_MIN:
            raise ValueError(f"expected tokens of {TOKEN_BYTES_MIN} bytes or more, one per line")
        return tuple(map(_digest, tokens))


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


class Material(NamedTuple):
    """What a handshake needs: for a socket of ours, and for gRPC."""

    context: ssl.SSLContext
    configuration: grpc.ServerCertificateConfiguration


class TlsFiles:
    """The newest loadable material."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._config = config
        wanted = (config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file)
        self._paths = [path for path in wanted if path]
        self._material = WatchedFiles("certificate", config.tls_cert_file, self._load, "tls_cert_file", clock)

    def context(self) -> ssl.SSLContext:
        """For a server's socket: every handshake gets the newest material."""
        outer = self._material.newest().context

        def renew(handshake: ssl.SSLObject, _name: str | None, _outer: ssl.SSLContext) -> None:
            handshake.context = self._material.newest().context

        outer.sni_callback = renew  # called at every ClientHello, with a name or without
        return outer

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Server credentials that follow the files."""
        given = self._material.newest()

        def newer() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            before, given = given, self._material.newest()
            return None if given is before else given.configuration

        return grpc.dynamic_ssl_server_credentials(
            given.configuration,
            newer,  # type: ignore[arg-type]  # None is documented: nothing new
            require_client_authentication=bool(self._config.tls_client_ca_file),
        )

    def _load(self) -> Material:
        config = self._config
        certificate, key, *client_ca = [read_file(Path(path)) for path in self._paths]  # an error names its file
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(config.tls_cert_file, config.tls_key_file, _refuse_passphrase)
        if config.tls_client_ca_file:
            context.load_verify_locations(config.tls_client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        configuration = grpc.ssl_server_certificate_configuration(
            [(key, certificate)], root_certificates=client_ca[0] if client_ca else None
        )
        return Material(context, configuration)


def _refuse_passphrase() -> str:
    """Instead of OpenSSL's question on the terminal, for which the whole process would wait."""
    raise ValueError("its key has a passphrase, which nobody is asked for")


def read_credentials(config: Config, clock: Clock) -> tuple[TlsFiles | None, TokenFile | None]:
    """What closes the receivers; a ConfigError names what is asked for and cannot be read."""
    if not config.tls_cert_file and (config.tls_key_file or config.tls_client_ca_file):
        raise ConfigError("tls_cert_file", "has to be given with tls_key_file or tls_client_ca_file")
    if config.tls_cert_file and not config.tls_key_file:
        raise ConfigError("tls_key_file", "has to be given with tls_cert_file")
    tls = TlsFiles(config, clock) if config.tls_cert_file else None
    return tls, TokenFile(config.token_file, "token_file", clock) if config.token_file else None
