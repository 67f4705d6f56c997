"""Who may send: bearer tokens and TLS, both read again while the process runs.

**Tokens** are in a file, one per line, so that an old and a new one can hold side by side. The file is checked at most
once a second and read when it has changed (a mounted Secret is swapped whole). While it cannot be read or holds no
token the last good tokens stay in force. Tokens are compared in constant time, by their digests, and never logged.

**TLS** has certificate, key and client CA in files. A new pair takes effect at the next handshake; connections that
stand keep theirs. A pair that does not load (half written, key of another certificate) is refused and the former one
stays. Expiry is the client's verdict: an expired certificate fails handshakes until it is replaced, and nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import ssl
import threading
from pathlib import Path
from typing import NamedTuple

import grpc

from collector.config import Config, ConfigError, parse_endpoint
from collector.runtime import Clock

CHECK_EVERY_NS = 1_000_000_000
TOKEN_BYTES_MIN = 16
FILE_BYTES_MAX = 65_536
TOKENS_MAX = 16
RELOAD_NS = 10_000_000_000
"""How often certificate and key are looked at for changes."""

_log = logging.getLogger(__name__)


class TokenFile:
    """The tokens of one file; ``key`` names the configuration key in errors."""

    def __init__(self, path: str, key: str, clock: Clock) -> None:
        self._path = Path(path)
        self._clock = clock
        self._lock = threading.Lock()
        """Guards everything below."""
        self._checked_ns = clock.monotonic_ns()
        try:
            self._version = self._stat()
            self._digests = self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(key, f"{path}: {error}") from None

    def accepts(self, authorization: str | None) -> bool:
        """Whether an ``Authorization`` header bears one of the tokens."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            return False
        digest = _digest(token.strip().encode("utf-8", "backslashreplace"))
        return any([hmac.compare_digest(digest, known) for known in self._current()])  # noqa: C419 -- look at all

    def _current(self) -> tuple[bytes, ...]:
        with self._lock:
            now_ns = self._clock.monotonic_ns()
            if now_ns - self._checked_ns >= CHECK_EVERY_NS:
                self._checked_ns = now_ns
                self._reload_if_changed()
            return self._digests

    def _reload_if_changed(self) -> None:
        try:
            version = self._stat()
            if version == self._version:
                return
            self._version = version
            self._digests = self._read()
        except (OSError, ValueError):
            _log.warning("token file %s has no usable token; the former ones stay", self._path)
        else:
            _log.info("token file %s read again", self._path)

    def _stat(self) -> tuple[int, int, int]:
        stat = self._path.stat()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _read(self) -> tuple[bytes, ...]:
        with self._path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX)
        tokens = [line.strip() for line in data.splitlines() if line.strip()]
        if not tokens:
            raise ValueError("holds no token")
        if len(tokens) > TOKENS_MAX or min(map(len, tokens)) < TOKEN_BYTES_MIN:
            raise ValueError(f"expected at most {TOKENS_MAX} tokens of {TOKEN_BYTES_MIN} bytes or more, one per line")
        return tuple(map(_digest, tokens))


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


class Material(NamedTuple):
    """What a handshake needs, as PEM; ``client_ca`` empty means that clients need no certificate."""

    certificate: bytes
    key: bytes
    client_ca: bytes


class TlsFiles:
    """The newest loadable material."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        """Guards everything below."""
        self._checked_ns = clock.monotonic_ns()
        try:
            self._version = self._stat()
            self._context, self._material = self._load()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError("tls_cert_file", f"cannot be loaded: {error}") from None

    def context(self) -> ssl.SSLContext:
        """For a server's socket: every handshake gets the newest material."""
        outer = self._context

        def renew(handshake: ssl.SSLObject, _name: str | None, _outer: ssl.SSLContext) -> None:
            with self._lock:
                self._reload_if_changed()
                handshake.context = self._context

        outer.sni_callback = renew  # called at every ClientHello, with a name or without
        return outer

    def material(self) -> Material:
        """For the next handshake of gRPC."""
        with self._lock:
            self._reload_if_changed()
            return self._material

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Server credentials that follow the files."""
        given = self.material()

        def newer() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            material = self.material()
            if material is given:
                return None
            given = material
            return _grpc_configuration(material)

        return grpc.dynamic_ssl_server_credentials(
            _grpc_configuration(given),
            newer,  # type: ignore[arg-type]  # None is documented: nothing new
            require_client_authentication=bool(given.client_ca),
        )

    def _reload_if_changed(self) -> None:
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._checked_ns < RELOAD_NS:
            return
        self._checked_ns = now_ns
        try:
            version = self._stat()
            if version == self._version:
                return
            self._version = version
            self._context, self._material = self._load()
        except (OSError, ValueError):
            _log.warning("new TLS files do not load; the former ones stay")
        else:
            _log.info("TLS files read again")

    def _paths(self) -> list[Path]:
        config = self._config
        return [Path(path) for path in (config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file) if path]

    def _stat(self) -> tuple[tuple[int, int, int], ...]:
        stats = [path.stat() for path in self._paths()]
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)

    def _load(self) -> tuple[ssl.SSLContext, Material]:
        config = self._config
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(config.tls_cert_file, config.tls_key_file)
        if config.tls_client_ca_file:
            context.load_verify_locations(config.tls_client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        certificate, key, *client_ca = [path.read_bytes() for path in self._paths()]
        return context, Material(certificate, key, client_ca[0] if client_ca else b"")


def _grpc_configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    pairs = [(material.key, material.certificate)]
    return grpc.ssl_server_certificate_configuration(pairs, root_certificates=material.client_ca or None)


def read_credentials(config: Config, clock: Clock) -> tuple[TlsFiles | None, TokenFile | None]:
    """What closes the receivers; a ConfigError names what is asked for and cannot be read."""
    if not config.tls_cert_file and (config.tls_key_file or config.tls_client_ca_file):
        raise ConfigError("tls_cert_file", "has to be given with tls_key_file or tls_client_ca_file")
    if config.tls_cert_file and not config.tls_key_file:
        raise ConfigError("tls_key_file", "has to be given with tls_cert_file")
    tls = TlsFiles(config, clock) if config.tls_cert_file else None
    return tls, TokenFile(config.token_file, "token_file", clock) if config.token_file else None


def warn_of_open_ports(config: Config) -> None:
    """Log which receivers without token and TLS others than this host can reach."""
    listening = {"listen": config.listen} | ({"listen_http": config.listen_http} if config.listen_http else {})
    open_ports = [f"{k}: {at}" for k, at in listening.items() if not _is_loopback(parse_endpoint(at).address)]
    if open_ports:  # one line: a second one of the same text would be held back
        _log.warning("open to anybody: %s; set token_file or tls_cert_file", ", ".join(open_ports))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
