"""The file system calls of the journal and the state store, so that tests can make them fail or wait."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Protocol


class Volume(NamedTuple):
    """The volume that a directory lies on."""

    free_bytes: int
    """For this user."""
    size_bytes: int
    """0 where it has none to tell."""


class Files(Protocol):
    """The file system calls that may fail or be slow; tests put theirs in."""

    def open(self, path: Path) -> int:
        """Create a file for appending."""
        ...

    def write(self, descriptor: int, parts: list[bytes]) -> int:
        """Like writev(2)."""
        ...

    def overwrite(self, path: Path, head: bytes) -> None:
        """Write the first bytes of a file anew."""
        ...

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        """Like ftruncate(2)."""
        ...

    def sync(self, descriptor: int) -> None:
        """Like fdatasync(2)."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove one file from its directory."""
        ...

    def replace(self, source: Path, target: Path) -> None:
        """Like rename(2)."""
        ...

    def volume(self, directory: Path) -> Volume:
        """Like statvfs(3)."""
        ...


class SystemFiles:
    """The calls of the operating system."""

    def open(self, path: Path) -> int:
        """Create a file for appending."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, descriptor: int, parts: list[bytes]) -> int:
        """Like writev(2)."""
        return os.writev(descriptor, parts)

    def overwrite(self, path: Path, head: bytes) -> None:
        """Write the first bytes of a file anew."""
        with path.open("r+b", buffering=0) as file:
            file.write(head)

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        """Like ftruncate(2)."""
        os.ftruncate(descriptor, size_bytes)

    def sync(self, descriptor: int) -> None:
        """Like fdatasync(2)."""
        os.fdatasync(descriptor)

    def unlink(self, path: Path) -> None:
        """Remove one file from its directory."""
        path.unlink()

    def replace(self, source: Path, target: Path) -> None:
        """Like rename(2)."""
        source.replace(target)

    def volume(self, directory: Path) -> Volume:
        """Like statvfs(3)."""
        told = os.statvfs(directory)
        return Volume(told.f_bavail * told.f_frsize, told.f_blocks * told.f_frsize)


def sync_directory(directory: Path) -> None:
    """Make new names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
