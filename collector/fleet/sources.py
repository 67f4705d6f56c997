"""Where the states and the recordings of a fleet are, and how each is brought here or read.

A state is bounded in bytes and time:

    http://10.0.0.7:9464              a sidecar, whose /state is asked; another path is taken as it is
    dns+http://tracefit.llm.svc:9464  every address behind a name: the pods of a headless Service
    states/  a/state.bin              a directory and all below it (*.bin), or one file

A source that cannot be listed becomes one place, which is reported and counted as unreachable. Recordings are files, or
objects of a store that fsspec, an extra, knows: ``s3://bucket/prefix``.

A body goes straight into its file, so that memory does not grow with the fleet. Redirects are not followed and no
proxy of the environment is asked: a sidecar is in the cluster, and its token is for it alone.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from collector.config import with_scheme
from collector.ingest.scrape import Resolve, ScrapeTarget, addresses_of, targets_behind
from collector.recordings import Recording, recording_files, source_of
from collector.runtime import PrintLine, StartError, sentence
from collector.runtime.http import FetchError, HttpClient
from collector.service import state_files
from collector.telemetry import PullOutcome
from exporters.status_page import FleetSource

# --- states -----------------------------------------------------------------------------------------------------------

STATE_PATH = "/state"


class StateSource(NamedTuple):
    """One state, called by where it is: a page, or a file where there is none."""

    name: str
    page: ScrapeTarget | None = None


Place = StateSource | FleetSource
"""Where a state is; or the report on a source that cannot be listed."""


def find_targets(sources: Sequence[str], resolve: Resolve = addresses_of) -> list[Place]:
    """Every place as of now, without doubles, sorted by name within each source."""
    places: dict[str, Place] = {}
    for place in (place for source in sources for place in find_places(with_scheme(source), resolve)):
        places.setdefault(place.name, place)
    return list(places.values())


def find_places(source: str, resolve: Resolve = addresses_of) -> list[Place]:
    """The places of one source."""
    try:
        if "://" in source:
            return [StateSource(each.server, each) for each in targets_behind(source, STATE_PATH, resolve)]
        if Path(source).is_fifo():  # a state is read twice: to choose, then to add
            return [FleetSource(source, PullOutcome.UNREACHABLE, "a pipe can be read only once: give a file")]
        names = sorted(map(str, state_files(Path(source))))
        return [*map(StateSource, names)] or [FleetSource(source, PullOutcome.UNREACHABLE, "there is no *.bin")]
    except (OSError, ValueError) as error:
        name = source.partition("?")[0]  # a token may stand behind it
        return [FleetSource(name, PullOutcome.UNREACHABLE, sentence(error))]


STATE_BYTES_MAX = 1 << 26
"""A configuration takes some 70 kB; all that are asked at once have to find room on the volume."""
TIMEOUT_S = 10.0
"""Longest time for one state."""
CONNECTIONS = 16


async def fetch_states(
    places: Sequence[Place],
    directory: Path,
    token: Callable[[], str | None],
    done: Callable[[int], None],
) -> list[Path | FleetSource]:
    """Bring states into an empty directory, ``CONNECTIONS`` at a time; return the file of each, or why there is none.

    ``token`` is what sidecars are asked with (empty sends none), and ``done`` is told of each place that was asked.
    """
    free, client = asyncio.Semaphore(CONNECTIONS), HttpClient(TIMEOUT_S)

    async def fetch(place: Place, file: Path) -> Path | FleetSource:
        async with free:
            found = place if isinstance(place, FleetSource) else await _fetch(client, place, file, token)
        done(1)
        return found

    try:
        return await asyncio.gather(*(fetch(place, directory / str(number)) for number, place in enumerate(places)))
    finally:
        await client.close()


async def _fetch(
    client: HttpClient, place: StateSource, file: Path, token: Callable[[], str | None]
) -> Path | FleetSource:
    """Bring one state here, or say why that fails."""
    try:
        if place.page is None:
            shutil.copyfile(place.name, file)  # as it is now, whatever its sidecar writes meanwhile
            return file
        url, address = place.page
        with file.open("wb") as body:
            await client.get(url, body, STATE_BYTES_MAX, token=token() or "", address=address)
    except FetchError as error:
        is_young = error.status == HTTPStatus.SERVICE_UNAVAILABLE
        meant = "; is pages_state on there?" if error.status == HTTPStatus.NOT_FOUND else ""
        outcome = PullOutcome.NOTHING_YET if is_young else PullOutcome(error.outcome)
        return FleetSource(place.name, outcome, f"{error}{meant}")
    except (OSError, StartError) as error:
        return FleetSource(place.name, PullOutcome.UNREACHABLE, sentence(error))
    return file


# --- recordings -------------------------------------------------------------------------------------------------------


def find_recordings(paths: Sequence[str]) -> list[str]:
    """Every file and object, by source and name; StartError for a place that cannot be looked at, or has none."""
    files: set[str] = set()
    for place in paths:
        is_local = "://" not in place
        found = recording_files([place]) if is_local else _list_objects(place)
        if not found or (is_local and not Path(place).exists()):
            raise StartError(f"cannot read {place}: there is no such file or object")
        files.update(found)
    return sorted(files, key=lambda name: (source_of(name), name))


def _list_objects(url: str) -> list[str]:
    """An object, all below a prefix but for hidden ones, or those that match a pattern."""
    try:
        import fsspec  # noqa: PLC0415

        storage, path = fsspec.core.url_to_fs(url)
        found = storage.glob(path, detail=True) if "*" in path else storage.find(path, detail=True)
    except ImportError as error:
        raise StartError(f"{url} needs a package that is not installed ({error}): install the extra fleet") from None
    except Exception as error:  # noqa: BLE001 -- every store has errors of its own
        raise StartError(f"cannot read {url}: {type(error).__name__}: {error}") from None
    return [
        storage.unstrip_protocol(name)
        for name, about in found.items()
        if about.get("type") != "directory" and not name.rpartition("/")[2].startswith(".")
    ]


def open_recording(name: str, warn: PrintLine) -> Recording:
    """The file as a recording; a name may be any bytes, and is told in text."""
    source = source_of(name).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if "://" not in name:
        return Recording(name, warn, source)
    import fsspec  # noqa: PLC0415

    return Recording(name, warn, source, fsspec.open(name, "rb").open())
