r"""A state file: parts, sealed together.

    b"tracefit.state/1\n"  |  BLAKE2b-256 of the rest (32 bytes)  |  MessagePack {"version": 3, "parts": {name: graph}}

The part ``learners`` is what ``tracefit replay --state`` writes and what donors and merging read; a sidecar's file has
others beside it (collector/durable/image.py). A part is read when it is asked for.

Guarantees: a file cut at any byte or with any bit flipped raises :class:`StateError` and nothing is loaded from it; a
part of an older version is migrated step by step, on plain data; a newer version is refused by number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from . import version_2
from .arrays import packed
from .declared import StateError
from .graph import Graph, load

MAGIC = b"tracefit.state/1\n"
VERSION = 3
LEARNERS = "learners"
_DIGEST_BYTES = 32

Migrations = Mapping[int, Mapping[str, Callable[[Any], Any]]]
"""By version n and part: from n to n + 1, on plain data. What is not listed stays as it is; entries never go."""

MIGRATIONS: dict[int, dict[str, Callable[[Any], Any]]] = {
    1: {LEARNERS: version_2.count_residuals},
    2: {LEARNERS: version_2.learners},
}


class Image:
    """A file that has been read: its parts, as plain data of the version it was written by."""

    def __init__(self, version: int, parts: Mapping[str, Any], migrations: Migrations) -> None:
        self._version = version
        self._parts = parts
        self._migrations = migrations

    def load(self, part: str, root: Any, context: object = None) -> Any:
        """Fill ``root`` with what was saved, or make one if it is a class.

        Raises:
            StateError: there is no such part, or it does not fit; an object that was given must then be thrown away.
        """
        return load(self.graph(part), root, context)

    def graph(self, part: str) -> Graph:
        """Plain data of one part in today's layout."""
        if part not in self._parts:
            raise StateError(f"no {part} in this state file")
        try:
            data = self._parts[part]
            graph: Graph = msgspec.msgpack.decode(data) if isinstance(data, msgspec.Raw) else data
            for version in range(self._version, VERSION):
                for migrations in (MIGRATIONS, self._migrations):
                    migrate = migrations.get(version, {}).get(part)
                    graph = graph if migrate is None else migrate(graph)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
            raise StateError(f"corrupt state file: no {part} of version {self._version}: {error}") from error
        return graph

    def alone(self, part: str) -> bytes:
        """A file of this part only; StateError if there is none."""
        part_is_current = self._version == VERSION and part in self._parts
        graph = self._parts[part] if part_is_current else self.graph(part)
        return sealed(msgspec.msgpack.encode({"version": VERSION, "parts": {part: graph}}, enc_hook=packed))


class _Body(msgspec.Struct):
    version: int
    parts: dict[str, msgspec.Raw] = {}
    state: msgspec.Raw = msgspec.Raw()
    """Of versions 1 and 2."""


class Seal:
    """The head of a file whose body is added piece by piece; of its length from the beginning."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def add(self, piece: bytes) -> None:
        """The next piece of the body."""
        self._hash.update(piece)

    @property
    def head(self) -> bytes:
        """Magic and checksum of what was added."""
        return MAGIC + self._hash.digest()


def sealed(body: bytes) -> bytes:
    """The file: head, checksum, body."""
    return b"".join((MAGIC, _digest(body), body))


def decode(data: bytes, migrations: Migrations | None = None) -> Image:
    """The image in a file; ``migrations``: those of parts that are not the learners'.

    Raises:
        StateError: truncated, corrupt, not a state file, or of a version that cannot be read.
    """
    try:
        version, parts = _opened(data)
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
        raise error if isinstance(error, StateError) else StateError(f"corrupt state file: {error}") from error
    if version > VERSION:
        raise StateError(f"state version {version} is newer than {VERSION}: made by a later tracefit")
    if version < 1:
        raise StateError(f"state version {version} is none")
    return Image(version, parts, migrations or {})


def _opened(data: bytes) -> tuple[int, Mapping[str, Any]]:
    """Version and parts, the checksum being right."""
    if data.startswith(version_2.SIDECAR_MAGIC):
        inner = version_2.sidecar_parts(data)
        learners_version, learners = _opened(inner.pop("bank"))
        if learners_version == 1:
            learners = {LEARNERS: version_2.count_residuals(learners[LEARNERS])}
        return 2, {**inner, **learners}
    if not data.startswith(MAGIC):
        raise StateError(f"not a state file: it does not begin with {MAGIC.decode().strip()!r}")
    body = memoryview(data)[len(MAGIC) + _DIGEST_BYTES :]
    if _digest(body) != data[len(MAGIC) : len(MAGIC) + _DIGEST_BYTES]:
        raise StateError(f"corrupt state file: the checksum of {len(body)} bytes does not match")
    content = msgspec.msgpack.decode(body, type=_Body)
    if content.version <= version_2.VERSION:
        return content.version, {LEARNERS: version_2.learners_payload(content.state)}
    return content.version, content.parts


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
