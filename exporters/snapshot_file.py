"""Files that other programs read while we write them.

Guarantee: a reader sees the old bytes or the new bytes, never a part, also after a power cut. Written to a temporary
name in the same directory, flushed, fsynced, renamed over the target, and the directory fsynced (rename(2) is atomic,
but the new name is durable only once the directory is).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from exporters.blis import BlisError, export
from online import Snapshot

SNAPSHOT_NAME = "snapshot.json"
BLIS_SUFFIX = ".blis.yaml"
_CONFIG_ID = re.compile(r"[0-9a-f]{12}")  # as design has it; it becomes a file name
_MAY_BE_STALE = re.compile(r"[0-9a-f]{12}\.blis\.yaml|\.(snapshot\.json|[0-9a-f]{12}\.blis\.yaml)\.tmp\.\d+")

MAX_BLIS_FILES = 256
"""Each costs an fsync; a sidecar has a handful of configurations."""

FILE_MODE = 0o644
"""Readable for a simulator or a router that runs under another user in the same pod."""


def write_atomically(path: Path, data: bytes, mode: int = FILE_MODE) -> None:
    """Replace a file's content as one step.

    Raises:
        OSError: directory missing, read-only or full. The old file is untouched and no temporary file stays.
    """
    temporary = path.parent / f".{path.name}.tmp.{os.getpid()}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
            file.write(data)
            file.flush()
            os.fchmod(descriptor, mode)  # whatever the umask
            os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def published_snapshot(path: Path) -> Snapshot | None:
    """The snapshot in a file; None without one that this version reads."""
    try:
        return Snapshot.from_json(path.read_bytes())
    except (OSError, ValueError, msgspec.DecodeError):
        return None


class WriteReport(NamedTuple):
    """What a round of writing did; errors are (file name, reason) with the reason from ``OSError.strerror``."""

    written: tuple[str, ...]
    errors: tuple[tuple[str, str], ...]


def write_snapshot(directory: Path, snapshot: Snapshot) -> WriteReport:
    """Write ``snapshot.json`` and one ``<config_id>.blis.yaml`` per configuration that BLIS can hold.

    Each file is replaced as one step; one that cannot be written does not keep the others from it. A BLIS file whose
    configuration left the snapshot, or lost a coefficient, is removed: absent beats stale. So is what a killed process
    has left half written, since nobody else may write here meanwhile.

    Of the configurations, the first ``MAX_BLIS_FILES``. The directory is not created, so that a vanished mount is an
    error and not a directory on the root disk; OSError is never raised.
    """
    files = {SNAPSHOT_NAME: snapshot.to_json()}
    for config in snapshot.configs[:MAX_BLIS_FILES]:
        if _CONFIG_ID.fullmatch(config.config_id):
            with contextlib.suppress(BlisError):
                files[f"{config.config_id}{BLIS_SUFFIX}"] = export(snapshot, config)[0]
    written, errors = [], []
    for name in (*files, *_stale(directory, files)):
        try:
            if name in files:
                write_atomically(directory / name, files[name])
                written.append(name)
            else:
                (directory / name).unlink()
        except OSError as error:
            errors.append((name, error.strerror or type(error).__name__))
    return WriteReport(tuple(written), tuple(errors))


def _stale(directory: Path, files: Mapping[str, bytes]) -> list[str]:
    try:
        names = sorted(path.name for path in directory.iterdir())
    except OSError:
        return []
    return [name for name in names if name not in files and _MAY_BE_STALE.fullmatch(name)]
