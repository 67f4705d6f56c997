"""Which files are read, and which of them are one source: directories, standard input, files in rotation.

A file is a source of its own, because two recordings may be of two machines. Files that a rotation made of one are one:

    traces-2026-11-22T05-02-14.173.json   the Collector's file exporter (``-size`` or the like may follow the time)
    traces.json-20261122  traces.json.1   logrotate

each perhaps with ``.gz`` or ``.zst``, beside ``traces.json``, after which the source is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from collector.runtime import StartError

from .reader import Recording

STDIN: Final = Path("-")
_ROTATED = re.compile(
    r"(?P<stem>.+?)(?:"
    r"-\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\.\d{3}(?:-[a-z]+)?(?P<suffix>\.[^.]+)?"
    r"|-20\d{6}(?:-?\d{2,10})?"
    r"|\.\d{1,3}"
    r")(?:\.gz|\.zst)?"
)


def open_recordings(
    paths: Sequence[Path], warn: Callable[[str], None], stdin: BinaryIO | None = None
) -> list[Recording]:
    """Open files, the files of directories, and ``-``, which is ``stdin``; StartError for what cannot be."""
    files = dict.fromkeys(file for path in paths for file in _files(path))
    return [Recording(file, warn, source=source_of(file), stream=stdin if file == STDIN else None) for file in files]


def by_source(recordings: Sequence[Recording]) -> list[list[Recording]]:
    """The recordings of each source together, in the order of their first ones."""
    sources: dict[str, list[Recording]] = {}
    for recording in recordings:
        sources.setdefault(recording.label, []).append(recording)
    return list(sources.values())


def source_of(file: Path) -> str:
    """The name of what a file is a recording of."""
    rotated = _ROTATED.fullmatch(file.name)
    return str(file.with_name(rotated["stem"] + (rotated["suffix"] or "")) if rotated else file)


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    below = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
    files = [path / file for file in sorted(below) if not any(part.startswith(".") for part in file.parts)]
    if not files:
        raise StartError(f"cannot read {path}: there is no file in it")
    yield from files
