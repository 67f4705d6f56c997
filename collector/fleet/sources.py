"""Where the states and the recordings of a fleet are, and how each is brought here or read.

A state is bounded in bytes and time:

    http://10.0.0.7:9464              a sidecar, whose /state is asked; another path is taken as it is
    dns+http://tracefit.llm.svc:9464  every address behind a name: the pods of a headless Service
    states/  a/state.bin              a directory and all below it (*.bin), or one file
    s3://bucket/prefix                an object, or all below a prefix (*.bin); whatever fsspec, an extra, knows

A source that cannot be looked at is a place of its own, which is then said and counted as unreachable.

A body goes straight into its file, so that memory does not grow with the fleet. Redirects are not followed and no
proxy of the environment is asked: a sidecar is in the cluster, and its token is for it alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import io
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, cast

import aiohttp
from yarl import URL

from collector.config import is_page_url, with_scheme
from collector.ingest.scrape import addresses_of
from collector.recordings import STDIN, Recording, recording_files, source_of
from collector.runtime import PrintLine, StartError
from collector.telemetry import PullOutcome
from exporters.status_page import FleetSource

_TALKATIVE: Final = ("aiobotocore", "azure", "gcsfs")
"""They tell of every request, with its headers."""


def open_store(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it; StartError if a package is missing."""
    try:
        import fsspec  # noqa: PLC0415
    except ImportError:
        raise StartError(f"{url} needs a package that is not installed: install tracefit's extra fleet") from None
    try:
        storage, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise StartError(f"cannot read {url}: {error}") from None
    for library in _TALKATIVE:
        logging.getLogger(library).setLevel(logging.WARNING)
    return storage, str(path)


class StoreError(Exception):
    """An object could not be read to its end: half of it taken for the whole would be a wrong result."""


@contextlib.contextmanager
def _raise_as(kind: type[OSError | StoreError], prefix: str = "") -> Iterator[None]:
    """Every store has errors of its own; here they are of one kind."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        raise kind(f"{prefix}{type(error).__name__}: {error}") from None


class RecordedFile(NamedTuple):
    """A file or object, and its size."""

    name: str
    size_bytes: int


def list_objects(url: str) -> list[RecordedFile]:
    """An object, all below a prefix but for hidden ones, or those that match a pattern.

    Raises:
        StartError: a package is missing.
        OSError: the store says no.
    """
    storage, path = open_store(url)
    with _raise_as(OSError):
        found = storage.glob(path, detail=True) if "*" in path else storage.find(path, detail=True)
    above, (scheme, _, rest) = path.rstrip("/") + "/", url.partition("://")
    root = f"{scheme}:///" if rest.startswith("/") else f"{scheme}://"
    return [
        RecordedFile(root + name.lstrip("/"), int(about.get("size") or 0))
        for name, about in found.items()
        if about.get("type") != "directory" and "/." not in "/" + name.removeprefix(above)
    ]


# --- states -----------------------------------------------------------------------------------------------------------

SOURCES_MAX = 10_000
"""Most states of one source; the rest is said."""
STATE_SUFFIX = ".bin"
STATE_PATH = "/state"
_HTTP = ("http", "https")
_DNS = "dns+"

Resolve = Callable[[str, int], list[str]]


class StateSource(NamedTuple):
    """One state, called by where it is: over HTTP, an object, or a file.

    ``url`` is what is asked for over HTTP, at one ``address`` of several behind its name; ``problem``: why a source
    could not be looked at.
    """

    name: str
    url: str = ""
    address: str = ""
    problem: str = ""


def check_sources(sources: Sequence[str]) -> None:
    """StartError if a source is none, or needs what is not installed."""
    for source in map(with_scheme, sources):
        scheme, is_url, rest = source.partition("://")
        if not source or (is_url and not (scheme and rest)):
            raise StartError(f"{source!r} is no source of states")
        if is_url and scheme.removeprefix(_DNS) in _HTTP:
            if not is_page_url(source.removeprefix(_DNS)):
                raise StartError(f"{source!r} is no URL of a sidecar")
        elif is_url:
            open_store(source)


def find_targets(sources: Sequence[str], resolve: Resolve = addresses_of) -> list[StateSource]:
    """Every place as of now, without doubles, sorted by name within each source."""
    places: dict[str, StateSource] = {}
    for source in map(with_scheme, sources):
        try:
            found = list(_look_at(source, resolve))
        except (OSError, ValueError, StartError) as error:
            found = [StateSource(source, problem=sentence(error))]
        for place in found:
            places.setdefault(place.name, place)
    return list(places.values())


def _look_at(source: str, resolve: Resolve) -> Iterator[StateSource]:
    scheme, is_url, _ = source.partition("://")
    if is_url and scheme.removeprefix(_DNS) in _HTTP:
        asked = _state_url(source.removeprefix(_DNS))
        if not scheme.startswith(_DNS):
            yield StateSource(str(asked), url=str(asked))
            return
        for address in resolve(asked.host or "", asked.port or 0):
            yield StateSource(str(asked.with_host(address)), str(asked), address)
    else:
        yield from _below(source)


def _below(source: str) -> Iterator[StateSource]:
    """The file or object that a source names, or all states below it, the first so many by name."""
    listed = [file.name for file in list_objects(source)] if "://" in source else recording_files([source])
    names = sorted(name for name in listed if name.endswith(STATE_SUFFIX))
    if len(listed) == 1 and f"/{listed[0]}".endswith(f"/{source.rpartition('/')[2]}"):
        names = listed
    yield from map(StateSource, names[:SOURCES_MAX])
    if not names:
        yield StateSource(source, problem=f"there is no *{STATE_SUFFIX} in it")
    if len(names) > SOURCES_MAX:
        yield StateSource(source, problem=f"more than {SOURCES_MAX} states are in it; the first by name were taken")


def _state_url(url: str) -> URL:
    asked = URL(url)
    return asked.with_path(STATE_PATH).with_query(asked.query) if asked.path in ("", "/") else asked


def sentence(error: Exception) -> str:
    """What went wrong, in the words of the system where it has any."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


STATE_BYTES_MAX = 1 << 30
CONNECTIONS = 16
_CHUNK_BYTES = 1 << 18
_OUTCOMES = {
    401: PullOutcome.UNAUTHENTICATED,
    403: PullOutcome.UNAUTHENTICATED,
    503: PullOutcome.NOTHING_YET,
}


class _Refusal(Exception):
    """A state that is not taken, and why."""

    def __init__(self, outcome: PullOutcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


async def fetch_states(
    places: Sequence[StateSource],
    directory: Path,
    timeout_s: float,
    token: Callable[[], str | None] = str,
    done: Callable[[int], None] = lambda _: None,
) -> list[Path | FleetSource]:
    """Where each state lies now in an empty directory, or why there is none; ``CONNECTIONS`` at a time.

    ``timeout_s`` is the longest time for one state, ``token`` is what sidecars are asked with (empty sends none), and
    ``done`` is told of each place that was asked.
    """
    free, timeout = asyncio.Semaphore(CONNECTIONS), aiohttp.ClientTimeout(total=timeout_s)

    async def fetch(session: aiohttp.ClientSession, place: StateSource, file: Path) -> Path | FleetSource:
        try:
            async with free:
                await _fetch(session, place, file, token)
        except _Refusal as refusal:
            return FleetSource(place.name, refusal.outcome, str(refusal))
        except TimeoutError:
            return FleetSource(place.name, PullOutcome.UNREACHABLE, f"no answer within {timeout_s:g} s")
        except (OSError, ValueError, StartError, aiohttp.ClientError) as error:
            return FleetSource(place.name, PullOutcome.UNREACHABLE, sentence(error))
        finally:
            done(1)
        return file

    async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
        return await asyncio.gather(
            *(fetch(session, place, directory / str(number)) for number, place in enumerate(places))
        )


async def _fetch(
    session: aiohttp.ClientSession, place: StateSource, file: Path, token: Callable[[], str | None]
) -> None:
    if place.problem:
        raise _Refusal(PullOutcome.UNREACHABLE, place.problem)
    if place.url:
        await _ask(session, place, file, token())
    elif "://" in place.name:
        await asyncio.to_thread(_copy_object, place.name, file)
    else:
        _copy_file(Path(place.name), file)


def _copy_file(path: Path, file: Path) -> None:
    """As it is now, whatever its sidecar writes meanwhile."""
    _check_size(path.stat().st_size)
    if not path.is_file():
        raise OSError("it is no file")
    shutil.copyfile(path, file)


def _copy_object(url: str, file: Path) -> None:
    storage, name = open_store(url)
    with _raise_as(OSError):
        size_bytes = storage.size(name)
    _check_size(size_bytes or 0)
    with _raise_as(OSError):
        storage.get_file(name, str(file))


async def _ask(session: aiohttp.ClientSession, place: StateSource, file: Path, token: str | None) -> None:
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
    url, host = place.url, None
    if place.address:  # of the many behind the name, which stays what is asked for
        asked = URL(place.url)
        url, host, headers["Host"] = place.name, asked.host, asked.raw_authority
    async with session.get(url, headers=headers, allow_redirects=False, server_hostname=host) as response:
        if response.status != http.HTTPStatus.OK:
            outcome = _OUTCOMES.get(response.status, PullOutcome.REFUSED)
            raise _Refusal(outcome, f"status {response.status} {response.reason}{_remedy(response.status, url)}")
        announced, size_bytes = response.content_length, 0
        _check_size(announced or 0)
        with file.open("wb") as body:
            try:
                async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                    size_bytes += len(chunk)
                    _check_size(size_bytes)
                    body.write(chunk)
            except aiohttp.ClientPayloadError:
                whole = "all" if announced is None else announced
                detail = f"the answer broke off after {size_bytes} of {whole} bytes"
                raise _Refusal(PullOutcome.UNREACHABLE, detail) from None


def _remedy(status: int, url: str) -> str:
    """What would help; empty where nobody knows."""
    is_off = status == http.HTTPStatus.NOT_FOUND and URL(url).path == STATE_PATH
    return "; set TRACEFIT_PAGES_STATE=true in that sidecar" if is_off else ""


def _check_size(size_bytes: int) -> None:
    if size_bytes > STATE_BYTES_MAX:
        raise _Refusal(PullOutcome.TOO_LARGE, f"larger than {STATE_BYTES_MAX >> 20} MiB")


# --- recordings -------------------------------------------------------------------------------------------------------


def find_recordings(places: Sequence[str]) -> list[RecordedFile]:
    """Every file and object, by source and name; StartError for a place that cannot be looked at, or has none."""
    files: dict[str, RecordedFile] = {}
    for place in places:
        if place == STDIN:
            raise StartError("standard input is on this machine alone: `tracefit replay -` reads it")
        try:
            found = list_objects(place) if "://" in place else _local_files(place)
        except OSError as error:
            raise StartError(f"cannot read {place}: {sentence(error)}") from None
        if not found:
            raise StartError(f"cannot read {place}: there is no object in it")
        files |= {file.name: file for file in found}
    return sorted(files.values(), key=lambda file: (source_of(file.name), file.name))


def _local_files(place: str) -> list[RecordedFile]:
    return [
        RecordedFile(name, os.stat(name).st_size)  # noqa: PTH116 -- there may be a million
        for name in recording_files([place])
    ]


class _Object(io.RawIOBase):
    """An object as a stream whose errors are StoreError, so that nobody takes them for a file that is cut short."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._object: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _raise_as(StoreError, f"cannot read {self._name}: "):
            if self._object is None:
                storage, path = open_store(self._name)
                self._object = storage.open(path, "rb")
            data = self._object.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def open_recording(file: RecordedFile, warn: PrintLine) -> Recording:
    """The file as a recording; a name may be any bytes, and is told in text."""
    source = source_of(file.name).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    stream = cast("BinaryIO", io.BufferedReader(_Object(file.name), 4 << 20)) if "://" in file.name else None
    return Recording(file.name, warn, source, stream)
