"""Files that other programs read while we write them.

Guarantee: a reader sees the old bytes or the new bytes, never a part, also after a power cut. Written to a temporary
name in the same directory, flushed, fsynced, renamed over the target, and the directory fsynced (rename(2) is atomic,
but the new name is durable only once the directory is).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FILE_MODE = 0o644
"""Readable for a simulator or a router that runs under another user in the same pod."""


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content as one step.

    Args:
        path: the file; its directory must exist.
        data: the whole new content.

    Raises:
        OSError: directory missing, read-only or full. The old file is untouched and no temporary file stays.
    """
    temporary = path.parent / f".{path.name}.tmp.{os.getpid()}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
            file.write(data)
            file.flush()
            os.fchmod(descriptor, FILE_MODE)  # whatever the umask
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
