"""Where states are: what a SOURCE of `tracefit fleet` stands for at the moment.

    http://10.0.0.7:9464              a sidecar, whose /state is asked; another path is taken as it is
    dns+http://tracefit.llm.svc:9464  every address behind a name: the pods of a headless Service
    @targets.yaml                     a file of targets as Prometheus reads them, read again every time
    states/  a/state.bin              a directory and all below it (*.bin), or one file
    s3://bucket/prefix                an object, or all below a prefix (*.bin); whatever fsspec knows

A source that cannot be looked at is a place of its own, which is then said and counted as unreachable.
"""

from __future__ import annotations

import heapq
import os
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from collector.receive.scrape import addresses_of, read_targets
from collector.runtime import StartError

from .object_store import open_store

PLACES_MAX = 10_000
"""Most states of one source; the rest is said."""
STATE_SUFFIX = ".bin"
STATE_PATH = "/state"
_HTTP = ("http", "https")
_DNS = "dns+"

Resolve = Callable[[str, int], list[str]]


class StatePlace(NamedTuple):
    """One state: over HTTP, a file, or an object; ``problem``: why a source could not be looked at."""

    name: str
    url: str = ""
    address: str = ""
    path: Path | None = None
    storage: Any = None
    problem: str = ""


def check_sources(sources: Sequence[str]) -> None:
    """StartError if a source is none, or needs what is not installed."""
    for source in sources:
        scheme, is_url, rest = source.partition("://")
        if not source or (is_url and not (scheme and rest)):
            raise StartError(f"{source!r} is no source of states")
        if is_url and scheme.removeprefix(_DNS) in _HTTP:
            _check_url(source.removeprefix(_DNS))
        elif is_url:
            open_store(source)


def look(sources: Sequence[str], resolve: Resolve = addresses_of) -> list[StatePlace]:
    """Every place as of now, without doubles, sorted by name within each source."""
    places: dict[str, StatePlace] = {}
    for source in sources:
        try:
            found = list(_look_at(source, resolve))
        except (OSError, ValueError) as error:
            found = [StatePlace(source, problem=_sentence(error))]
        for place in found:
            places.setdefault(place.name, place)
    return list(places.values())


def _look_at(source: str, resolve: Resolve) -> Iterator[StatePlace]:
    if source.startswith("@"):
        for target in read_targets(Path(source[1:]), STATE_PATH):
            yield StatePlace(target.url, url=target.url)
    elif source.startswith(_DNS):
        yield from _behind(source.removeprefix(_DNS), resolve)
    elif source.partition("://")[0] in _HTTP and "://" in source:
        url = _with_path(source)
        yield StatePlace(url, url=url)
    elif "://" in source:
        yield from _objects(source)
    else:
        yield from _files(Path(source))


def _behind(url: str, resolve: Resolve) -> Iterator[StatePlace]:
    parts = urllib.parse.urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    url = _with_path(url)
    for address in resolve(parts.hostname or "", port):
        shown = f"[{address}]" if ":" in address else address
        yield StatePlace(f"{parts.scheme}://{shown}:{port}{urllib.parse.urlsplit(url).path}", url=url, address=address)


def _files(path: Path) -> Iterator[StatePlace]:
    if not path.is_dir():
        yield StatePlace(str(path), path=path)
        return
    names = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)  # noqa: PTH118
    yield from _first(str(path), (name for name in names if _is_state(name)), lambda name: {"path": Path(name)})


def _objects(url: str) -> Iterator[StatePlace]:
    storage, path = open_store(url)
    scheme = url.partition("://")[0]
    try:
        names = storage.find(path) if storage.isdir(path) else [path]
    except Exception as error:  # noqa: BLE001 -- every store has errors of its own
        raise OSError(f"{type(error).__name__}: {error}") from None
    states = (name for name in names if name == path or _is_state(name))
    for place in _first(url, states, lambda name: {"storage": (storage, name)}):
        yield place if place.problem else place._replace(name=f"{scheme}://{place.name}")


def _first(source: str, names: Iterable[str], where: Callable[[str], dict[str, Any]]) -> Iterator[StatePlace]:
    """The first so many by name; holds no more, however many there are."""
    kept = heapq.nsmallest(PLACES_MAX + 1, names)
    for name in kept[:PLACES_MAX]:
        yield StatePlace(name, **where(name))
    if not kept:
        yield StatePlace(source, problem=f"there is no *{STATE_SUFFIX} in it")
    if len(kept) > PLACES_MAX:
        yield StatePlace(source, problem=f"more than {PLACES_MAX} states are in it; the first by name were taken")


def _is_state(name: str) -> bool:
    return name.endswith(STATE_SUFFIX) and not Path(name).name.startswith(".")


def _with_path(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(path=STATE_PATH)) if parts.path in ("", "/") else url


def _check_url(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        valid = bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc and url.isascii()
    except ValueError:
        valid = False
    if not valid or any(character <= " " for character in url):
        raise StartError(f"{url!r} is no URL of a sidecar")


def _sentence(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
