r"""A state file: everything a restart needs, sealed.

    b"tracefit.sidecar/1\n"  |  SHA-256 of the rest (32 bytes)  |  MessagePack map

Guarantees: a file cut at any byte or with any bit flipped is refused as a whole; nothing is executed that the bytes
name. What the map holds of each class is listed in collector/durable/state.py and collector/durable/state_steps.py.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np

from online import StateError

MAGIC = b"tracefit.sidecar/1\n"
VERSION = 1
_DIGEST_BYTES = 32
_HEAD_BYTES = len(MAGIC) + _DIGEST_BYTES


class StateImage(msgspec.Struct, frozen=True):
    """A state as taken: ``seq`` is the last journal entry in it, ``generation`` the last one published."""

    seq: int
    generation: int
    spans: dict[str, Any]
    joiner: dict[str, Any]
    bank: bytes
    version: int = VERSION


def encode(image: StateImage) -> bytes:
    """MessagePack of an image, without head: shares nothing with the pipeline any more."""
    return msgspec.msgpack.encode(image, enc_hook=_plain_number)


def sealed(body: bytes) -> bytes:
    """The file: head, checksum, body."""
    return b"".join((MAGIC, hashlib.sha256(body).digest(), body))


def decode(data: bytes) -> StateImage:
    """The image in a file.

    Raises:
        StateError: truncated, corrupt, not a state file, or of another version.
    """
    if not data.startswith(MAGIC):
        raise StateError(f"not a state file: it does not begin with {MAGIC.decode().strip()!r}")
    body = memoryview(data)[_HEAD_BYTES:]
    if hashlib.sha256(body).digest() != data[len(MAGIC) : _HEAD_BYTES]:
        raise StateError(f"corrupt state file: the checksum of {len(body)} bytes does not match")
    try:
        image = msgspec.msgpack.decode(body, type=StateImage)
    except (ValueError, RecursionError, OverflowError) as error:  # also of text that is no UTF-8
        raise StateError(f"corrupt state file: {error}") from error
    if image.version != VERSION:
        raise StateError(f"state version {image.version} cannot be read, expected {VERSION}")
    if image.seq < 0 or image.generation < 0:
        raise StateError("corrupt state file: a count is negative")
    return image


def learners_of(data: bytes) -> bytes:
    """The learners' part of a sidecar's state file, as ``replay --state`` writes it; other bytes come back as they are.

    Raises:
        StateError: a sidecar's state file that cannot be read.
    """
    return decode(data).bank if data.startswith(MAGIC) else data


def _plain_number(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} in a state")  # what msgspec asks of an enc_hook
