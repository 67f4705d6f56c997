"""States brought here: bounded in bytes and time, kept on disk, asked for again by ETag.

A body goes straight into its file, so that memory does not grow with the fleet. Redirects are not followed and no
proxy of the environment is asked: a sidecar is in the cluster, and its token is for it alone.
"""

from __future__ import annotations

import hashlib
import http.client
import shutil
import ssl
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from collector.runtime import Clock
from collector.runtime.http import BoundedConnection
from collector.telemetry import PullOutcome

from .state_places import StatePlace

STATE_BYTES_MAX = 1 << 30
_CHUNK_BYTES = 1 << 18
_OUTCOMES = {
    401: PullOutcome.UNAUTHENTICATED,
    403: PullOutcome.UNAUTHENTICATED,
    503: PullOutcome.NOTHING_YET,
}


class Fetched(NamedTuple):
    """Where a state lies now, or why there is none."""

    place: StatePlace
    path: Path | None
    outcome: PullOutcome = PullOutcome.MERGED
    detail: str = ""


class _Refusal(Exception):
    """A state that is not taken, and why."""

    def __init__(self, outcome: PullOutcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


class StateFetcher:
    """Fetches into a directory of its own; ``fetch`` from any thread, one at a time per place.

    Args:
        directory: where bodies are kept from one pull to the next; made anew.
        clock: for the time limit.
        timeout_s: longest time for one state.
        token: read before each question; empty sends none.
    """

    def __init__(self, directory: Path, clock: Clock, timeout_s: float, token: Callable[[], str]) -> None:
        self._directory = directory
        self._clock = clock
        self._timeout_s = timeout_s
        self._token = token
        self._tags: dict[str, str] = {}
        self._tls: ssl.SSLContext | None = None
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)

    def close(self) -> None:
        """Remove what is kept."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def keep_only(self, places: list[StatePlace]) -> None:
        """What is kept of other places goes."""
        wanted = {place.name for place in places}
        for name in [name for name in self._tags if name not in wanted]:
            del self._tags[name]
            self._kept(name).unlink(missing_ok=True)

    def fetch(self, place: StatePlace) -> Fetched:
        """Bring one state here."""
        if place.problem:
            return Fetched(place, None, PullOutcome.UNREACHABLE, place.problem)
        try:
            return Fetched(place, self._bring(place))
        except _Refusal as refusal:
            return Fetched(place, None, refusal.outcome, str(refusal))
        except TimeoutError:
            return Fetched(place, None, PullOutcome.TIMEOUT, f"no answer within {self._timeout_s:g} s")
        except (OSError, ValueError, http.client.HTTPException) as error:
            text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            return Fetched(place, None, PullOutcome.UNREACHABLE, text)

    def _bring(self, place: StatePlace) -> Path:
        if place.path is not None:
            return self._hold(place.name, place.path)
        return self._ask(place) if place.url else self._copy(place)

    def _hold(self, name: str, path: Path) -> Path:
        """A file as it is now, whatever its sidecar writes meanwhile."""
        size_bytes = path.stat().st_size
        if not path.is_file():
            raise OSError("it is no file")
        if size_bytes > STATE_BYTES_MAX:
            raise _too_large()
        kept = self._kept(name)
        kept.unlink(missing_ok=True)
        try:
            kept.hardlink_to(path.resolve())
        except OSError:  # another file system, or not our file
            shutil.copyfile(path, kept)
        return kept

    def _kept(self, name: str) -> Path:
        return self._directory / hashlib.sha256(name.encode()).hexdigest()[:32]

    # --- HTTP -------------------------------------------------------------------------------------------------------

    def _ask(self, place: StatePlace) -> Path:
        parts = urllib.parse.urlsplit(place.url)
        headers = {"Accept-Encoding": "identity"}
        if token := self._token():
            headers["Authorization"] = f"Bearer {token}"
        kept, tag = self._kept(place.name), self._tags.get(place.name)
        if tag and kept.exists():
            headers["If-None-Match"] = tag
        tls = self._context() if parts.scheme == "https" else None
        connection = BoundedConnection(
            parts, timeout_s=self._timeout_s, clock=self._clock, tls=tls, address=place.address
        )
        try:
            connection.open()
            connection.request("GET", parts.path + (f"?{parts.query}" if parts.query else ""), headers=headers)
            with connection.getresponse() as response:
                if response.status == http.HTTPStatus.NOT_MODIFIED and "If-None-Match" in headers:
                    return kept
                if response.status != http.HTTPStatus.OK:
                    raise _Refusal(
                        _OUTCOMES.get(response.status, PullOutcome.REFUSED),
                        f"status {response.status} {response.reason}",
                    )
                self._tags.pop(place.name, None)
                self._save(response, kept)
                if new := response.getheader("ETag"):
                    self._tags[place.name] = new
        finally:
            connection.close()
        return kept

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    @staticmethod
    def _save(response: http.client.HTTPResponse, kept: Path) -> None:
        announced = response.length
        if announced is not None and announced > STATE_BYTES_MAX:
            raise _too_large()
        size_bytes = 0
        with kept.open("wb") as file:
            while chunk := response.read1(_CHUNK_BYTES):
                size_bytes += len(chunk)
                if size_bytes > STATE_BYTES_MAX:
                    raise _too_large()
                file.write(chunk)
        if announced is not None and size_bytes < announced:
            raise _Refusal(PullOutcome.UNREACHABLE, f"the answer broke off after {size_bytes} of {announced} bytes")

    # --- object storage ---------------------------------------------------------------------------------------------

    def _copy(self, place: StatePlace) -> Path:
        storage, name = place.storage
        kept = self._kept(place.name)
        try:
            info = storage.info(name)
            if (info.get("size") or 0) > STATE_BYTES_MAX:
                raise _too_large()
            tag = str(info.get("ETag") or info.get("etag") or info.get("mtime") or "")
            if tag and tag == self._tags.get(place.name) and kept.exists():
                return kept
            self._tags.pop(place.name, None)
            storage.get_file(name, str(kept))
        except _Refusal:
            raise
        except Exception as error:  # noqa: BLE001 -- every store has errors of its own
            raise OSError(f"{type(error).__name__}: {error}") from None
        if tag:
            self._tags[place.name] = tag
        return kept


def _too_large() -> _Refusal:
    return _Refusal(PullOutcome.TOO_LARGE, f"larger than {STATE_BYTES_MAX >> 20} MiB")
