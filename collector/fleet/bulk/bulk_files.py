"""Files and objects to replay: a path, a directory, ``s3://bucket/prefix``; whatever fsspec knows.

    NAME           a file, or all below a directory or a prefix
    NAME/*.pb.gz   those that match, in a store

What is read from a store is read again where that fails, and in the end the replay fails: half of an object taken for
the whole would be a result that nobody can tell from a right one.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, Final, NamedTuple, cast

from collector.fleet.object_store import open_store
from collector.recordings import STDIN, Recording, recording_files, source_of
from collector.runtime import StartError

READ_BYTES: Final = 4 << 20
TRIES: Final = 5
PAUSE_S = 0.5
"""Before the second try; twice as long before each further one."""


class BulkFile(NamedTuple):
    """One file, and how large it is; what it is a recording of; ``changed`` is another one when its content is."""

    name: str
    size_bytes: int
    source: str
    changed: str = ""


def find_bulk_files(places: Sequence[str]) -> list[BulkFile]:
    """Every file, by source and name; StartError for a place that cannot be looked at, or has none.

    A million of them take some 350 MB: a source is one text for all its files.
    """
    files: dict[str, BulkFile] = {}
    for place in places:
        for file in _objects(place) if "://" in place else _files(place):
            files.setdefault(file.name, file)
    return sorted(files.values(), key=lambda file: (file.source, file.name))


def open_bulk_file(file: BulkFile, warn: Callable[[str], None], stdin: BinaryIO | None = None) -> Recording:
    """The file as a recording; a name that is no text is told in text."""
    source = as_text(file.source)

    def tell(text: str) -> None:
        warn(as_text(text))

    if file.name == STDIN:
        return Recording(file.name, tell, source, stdin)
    if "://" not in file.name:
        return Recording(file.name, tell, source)
    storage, path = open_store(file.name)
    stream = io.BufferedReader(_Object(file.name, lambda: storage.open(path, "rb", block_size=READ_BYTES)), READ_BYTES)
    return Recording(file.name, tell, source, cast("BinaryIO", stream), file.size_bytes)


def as_text(name: str) -> str:
    """A file's name may be any bytes."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _files(place: str) -> Iterator[BulkFile]:
    for name in recording_files([place]):
        if name == STDIN:
            yield BulkFile(name, 0, name)
            continue
        try:
            status = os.stat(name)  # noqa: PTH116 -- there may be a million
        except OSError as error:
            raise StartError(f"cannot read {name}: {error.strerror}") from None
        yield BulkFile(name, status.st_size, sys.intern(source_of(name)), str(status.st_mtime_ns))


def _objects(url: str) -> Iterator[BulkFile]:
    storage, path = open_store(url)
    scheme = url.partition("://")[0]
    try:
        found = storage.glob(path, detail=True) if "*" in path else storage.find(path, detail=True)
    except Exception as error:  # noqa: BLE001 -- every store has errors of its own
        raise StartError(f"cannot read {url}: {type(error).__name__}: {error}") from None
    above = path.rstrip("/") + "/"
    objects = {
        name: about
        for name, about in found.items()
        if about.get("type") == "file" and not _is_hidden(name.removeprefix(above))
    }
    if not objects:
        raise StartError(f"cannot read {url}: there is no object in it")
    for name, about in objects.items():
        shown = f"{scheme}://{name.lstrip('/')}" if scheme != "file" else name
        changed = str(about.get("ETag") or about.get("etag") or about.get("LastModified") or about.get("mtime") or "")
        yield BulkFile(shown, int(about.get("size") or 0), sys.intern(source_of(shown)), changed)


def _is_hidden(below: str) -> bool:
    return below.startswith(".") or "/." in below


class StoreError(Exception):
    """An object could not be read to its end, however often that was tried."""


class _Object(io.RawIOBase):
    """An object read in order; where a read fails it is opened again and goes on from there."""

    def __init__(self, name: str, open_object: Callable[[], Any]) -> None:
        self._name = name
        self._open = open_object
        self._object: Any = None
        self._at = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        if self._object is not None:
            self._object.close()
        super().close()

    def _read(self, size: int) -> bytes:
        for left in reversed(range(TRIES)):
            try:
                if self._object is None:
                    self._object = self._open()
                    self._object.seek(self._at)
                return cast("bytes", self._object.read(size))
            except Exception as error:  # noqa: BLE001 -- every store has errors of its own
                self._object = None
                if not left:
                    raise StoreError(f"cannot read {self._name}: {type(error).__name__}: {error}") from None
                time.sleep(PAUSE_S * 2 ** (TRIES - 1 - left))
        raise AssertionError
