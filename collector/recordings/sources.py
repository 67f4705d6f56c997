"""Which files are read, and which of them are one source: directories, standard input, files in rotation.

A file is a source of its own, because two recordings may be of two machines. Files that a rotation made of one are one:

    traces-2026-11-22T05-02-14.173.json   the Collector's file exporter (``-size`` or the like may follow the time)
    traces.json-20261122  traces.json.1   logrotate

each perhaps with ``.gz`` or ``.zst``, beside ``traces.json``, after which the source is named. So are those that an
exporter for object stores wrote below one folder, each minute into another one; the folder and ``traces`` name them:

    otlp/year=2026/month=11/day=22/hour=05/minute=02/traces_483920175.binpb.gz
    otlp/2026/11/22/traces_05_02_14.json
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from collector.runtime import StartError

from .reader import Recording

STDIN: Final = "-"
_ROTATED: Final = re.compile(
    r"(?P<stem>.+?)(?:"
    r"-\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\.\d{3}(?:-[a-z]+)?(?P<suffix>\.[^.]+)?"
    r"|-20\d{6}(?:-?\d{2,10})?"
    r"|\.\d{1,3}"
    r")(?:\.gz|\.zst)?"
)
_PARTITIONED: Final = re.compile(
    r"(?P<above>.*?)/?(?:year=)?20\d\d/(?:month=)?\d\d(?:/(?:day=|hour=|minute=)?\d\d){0,3}/(?P<stem>[A-Za-z]*)[^/]*"
)


def open_recordings(
    paths: Sequence[Path], warn: Callable[[str], None], stdin: BinaryIO | None = None
) -> list[Recording]:
    """Open files, the files of directories, and ``-``, which is ``stdin``; StartError for what cannot be."""
    files = recording_files(map(str, paths))
    return [
        Recording(Path(file), warn, source=source_of(file), stream=stdin if file == STDIN else None) for file in files
    ]


def by_source(recordings: Sequence[Recording]) -> list[list[Recording]]:
    """The recordings of each source together, in the order of their first ones."""
    sources: dict[str, list[Recording]] = {}
    for recording in recordings:
        sources.setdefault(recording.label, []).append(recording)
    return list(sources.values())


def recording_files(paths: Iterable[str]) -> list[str]:
    """Each file once: those that are named, and all below directories but for hidden ones, by name."""
    return list(dict.fromkeys(file for path in paths for file in _files(path)))


def source_of(name: str) -> str:
    """The name of what a file, or an object, is a recording of."""
    partitioned = _PARTITIONED.fullmatch(name)
    if partitioned:
        return f"{partitioned['above']}/{partitioned['stem']}"
    folder, slash, file = name.rpartition("/")
    rotated = _ROTATED.fullmatch(file)
    return f"{folder}{slash}{rotated['stem']}{rotated['suffix'] or ''}" if rotated else name


def _files(path: str) -> Iterator[str]:
    path = os.path.normpath(path) if path != STDIN else path
    if not os.path.isdir(path):  # noqa: PTH112 -- a million files as Path objects are half a gigabyte
        yield path
        return
    names: list[str] = []
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [f"{folder}/{name}" for name in files if not name.startswith(".")]
    if not names:
        raise StartError(f"cannot read {path}: there is no file in it")
    # by their folders first, as pathlib has it
    yield from sorted(names, key=lambda name: name.split("/"))
