r"""A state file: parts, sealed together.

    b"tracefit.state/1\n"  |  BLAKE2b-256 of the rest (32 bytes)  |  MessagePack {"version": 4, "parts": {name: graph}}

The part ``learners`` is what ``tracefit replay --state`` writes and what donors and merging read; a sidecar's file has
others beside it (collector/service/store.py). A part is read when it is asked for.

Guarantees: a file cut at any byte or with any bit flipped raises :class:`StateError` and nothing is loaded from it; a
file of another version is refused by number.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec

from .arrays import packed
from .codec import _HEAD_BYTES, MAGIC, STATE_BYTES_MAX, VERSION, StateError, Tree, _array_of
from .graph import Graph, load


class Image:
    """A file that has been read: its parts, as plain data."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = parts

    def load(self, part: str, root: Any, context: object = None) -> Any:
        """Fill ``root`` with what was saved, or make one if it is a class.

        Raises:
            StateError: there is no such part, or it does not fit; an object that was given must then be thrown away.
        """
        return load(self.graph(part), root, context)

    def graph(self, part: str) -> Graph:
        """Plain data of one part."""
        if part not in self._parts:
            raise StateError(f"no {part} in this state file")
        try:
            data = self._parts[part]
            graph: Graph = msgspec.msgpack.decode(data) if isinstance(data, msgspec.Raw) else data
        except (ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
            raise StateError(f"corrupt state file: no {part}: {error}") from error
        return graph

    def tree(self, part: str) -> Tree:
        """A part that is a tree."""
        if part not in self._parts:
            raise StateError(f"no {part} in this state file")
        return msgspec.msgpack.decode(self._parts[part], ext_hook=_array_of)  # type: ignore[no-any-return]

    def alone(self, part: str) -> bytes:
        """A file of this part only; StateError if there is none."""
        graph = self._parts[part] if part in self._parts else self.graph(part)
        return sealed(
            zlib.compress(msgspec.msgpack.encode({"version": VERSION, "parts": {part: graph}}, enc_hook=packed), 1)
        )


class _Body(msgspec.Struct):
    version: int
    parts: dict[str, msgspec.Raw] = {}


def sealed(body: bytes) -> bytes:
    """The file: head, checksum, body."""
    return b"".join((MAGIC, _digest(body), body))


def decode(data: bytes) -> Image:
    """The image in a file.

    Raises:
        StateError: truncated, corrupt, not a state file, or of a version that cannot be read.
    """
    try:
        version, parts = _opened(data)
    except (zlib.error, ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
        raise error if isinstance(error, StateError) else StateError(f"corrupt state file: {error}") from error
    if version != VERSION:
        raise StateError(f"state version {version} is not {VERSION}: another tracefit made it")
    return Image(parts)


def _opened(data: bytes) -> tuple[int, Mapping[str, Any]]:
    """Version and parts, the checksum being right."""
    if not data.startswith(MAGIC):
        raise StateError(f"not a state file: it does not begin with {MAGIC.decode().strip()!r}")
    body = memoryview(data)[_HEAD_BYTES:]
    if _digest(body) != data[len(MAGIC) : _HEAD_BYTES]:
        raise StateError(f"corrupt state file: the checksum of {len(body)} bytes does not match")
    packer = zlib.decompressobj()
    content = msgspec.msgpack.decode(packer.decompress(body, STATE_BYTES_MAX), type=_Body)
    if not packer.eof:
        raise StateError("corrupt state file: it is larger than it may be, or its end is missing")
    return content.version, content.parts


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body).digest()
