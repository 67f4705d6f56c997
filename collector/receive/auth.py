"""Who are you: bearer tokens from a file, one per line so that an old and a new one can hold side by side.

The file is checked at most once a second and read when it has changed (a mounted Secret is swapped whole).
While it cannot be read or holds no token the last good tokens stay in force. Tokens are compared in constant time, by
their digests, and never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
from pathlib import Path

from collector.config import ConfigError
from collector.runtime import Clock

CHECK_EVERY_NS = 1_000_000_000
TOKEN_BYTES_MIN = 16
FILE_BYTES_MAX = 65_536
TOKENS_MAX = 16

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
