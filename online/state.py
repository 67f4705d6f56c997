r"""The state file: everything the learners know, so that stop and restart is no restart.

    b"tracefit.state/1\n"  |  BLAKE2b-256 of the rest (32 bytes)  |  MessagePack map, arrays as extension 1

Guarantees: what is read back is bitwise what was written (float64 as bytes; rows of an array that are all zero are
left out); a file cut at any byte or with any bit flipped raises :class:`StateError` and nothing is loaded from it; an
older version is migrated step by step, a newer one is refused by number.

``pack`` and ``unpack`` move named attributes of an object. ``unpack`` checks kind and shape against the fresh object
it fills, and values for finiteness, so that a state from another layout is refused and not half loaded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

MAGIC = b"tracefit.state/1\n"
VERSION = 2
_DIGEST_BYTES = 32
_ARRAY = 1
_KINDS = {"f8", "i8", "b1"}
_ARRAY_BYTES_MAX = 1 << 26

State = dict[str, Any]


def _without_residuals(state: State) -> State:
    """Version 1 did not count residuals: they begin at 0."""
    for config in state["configs"]:
        for target in config["targets"].values():
            target["residuals"] = None
    return state


MIGRATIONS: dict[int, Callable[[State], State]] = {1: _without_residuals}
"""From version n to n + 1; an entry is added with every change of layout and never removed."""


class StateError(ValueError):
    """The bytes are not a state this version can use; the message says why."""


def encode(payload: State) -> bytes:
    """Bytes of a state; deterministic for equal states."""
    body = msgspec.msgpack.encode({"version": VERSION, "state": payload}, enc_hook=_pack_array)
    return MAGIC + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() + body


def decode(data: bytes) -> State:
    """The state in ``data``.

    Raises:
        StateError: truncated, corrupt, not a state file, or of a version that cannot be read.
    """
    if not data.startswith(MAGIC):
        raise StateError(f"not a state file: it does not begin with {MAGIC.decode().strip()!r}")
    start = len(MAGIC) + _DIGEST_BYTES
    digest, body = data[len(MAGIC) : start], data[start:]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != digest:
        raise StateError(f"corrupt state file: the checksum of {len(body)} bytes does not match")
    try:
        outer = msgspec.msgpack.decode(body, ext_hook=_unpack_array)
        version, state = outer["version"], outer["state"]
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise StateError(f"corrupt state file: {error}") from error
    if not isinstance(version, int) or version > VERSION:
        raise StateError(f"state version {version} is newer than {VERSION}: made by a later tracefit")
    while version < VERSION:
        if version not in MIGRATIONS:
            raise StateError(f"state version {version} is too old: no migration to {version + 1}")
        try:
            state, version = MIGRATIONS[version](state), version + 1
        except (AttributeError, LookupError, TypeError) as error:
            raise StateError(f"corrupt state file: no layout of version {version}") from error
    if not isinstance(state, dict):
        raise StateError("corrupt state file: not a map")
    return state


def _pack_array(value: object) -> msgspec.msgpack.Ext:
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} in a state")  # what msgspec asks of an enc_hook
    kind, shape = value.dtype.str[1:], value.shape
    flat = np.ascontiguousarray(value).reshape(shape[0] if shape else 1, -1)
    used = np.flatnonzero(flat.view(np.uint8).reshape(len(flat), -1).any(axis=1)) if flat.size else np.zeros(0, int)
    body = (kind, list(shape), used.astype("<u2").tobytes() if len(flat) < 1 << 16 else None, b"")
    rows = flat if body[2] is None else flat[used]
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode((*body[:3], rows.tobytes())))


def _unpack_array(code: int, data: memoryview) -> object:
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code}")
    kind, shape, used, raw = msgspec.msgpack.decode(data, type=tuple[str, list[int], bytes | None, bytes])
    if kind not in _KINDS or any(n < 0 for n in shape) or math.prod(shape) * 8 > _ARRAY_BYTES_MAX:
        raise ValueError(f"array of kind {kind!r} and shape {shape}")
    rows = np.frombuffer(raw, np.dtype("<" + kind))
    if used is None:
        return rows.reshape(shape).copy()
    out = np.zeros(shape, np.dtype("<" + kind))
    flat = out.reshape(shape[0] if shape else 1, -1)
    flat[np.frombuffer(used, "<u2")] = rows.reshape(-1, flat.shape[1]) if rows.size else 0
    return out


def pack(source: object, names: Iterable[str]) -> State:
    """Named attributes; arrays are copied, so that learning on does not change the state taken."""
    state: State = {}
    for name in names:
        value = getattr(source, name)
        state[name] = value.copy() if isinstance(value, np.ndarray) else value
    return state


def unpack(target: object, names: Iterable[str], state: Mapping[str, Any]) -> None:
    """Set named attributes after checking all of them.

    Raises:
        StateError: a name is missing, or its kind, shape or a value does not fit.
    """
    checked = {name: _fitting(target, name, state) for name in names}
    for name, value in checked.items():
        setattr(target, name, value)


def pack_paths(source: object, paths: Mapping[str, str]) -> State:
    """Attributes of an object and of its members by their names in the state: name -> dotted path."""
    state: State = {}
    for name, path in paths.items():
        owner, attribute = _owner(source, path)
        state[name] = pack(owner, (attribute,))[attribute]
    return state


def unpack_paths(target: object, paths: Mapping[str, str], state: Mapping[str, Any]) -> None:
    """Set them again; see :func:`unpack`."""
    for name, path in paths.items():
        owner, attribute = _owner(target, path)
        if name not in state:
            raise StateError(f"{path} is missing")
        unpack(owner, (attribute,), {attribute: state[name]})


def _owner(source: object, path: str) -> tuple[object, str]:
    members, _, attribute = path.rpartition(".")
    return attrgetter(members)(source) if members else source, attribute


def _fitting(target: object, name: str, state: Mapping[str, Any]) -> Any:
    where = f"{type(target).__name__}.{name}"
    if name not in state:
        raise StateError(f"{where} is missing")
    value, fresh = state[name], getattr(target, name)
    if isinstance(fresh, np.ndarray):
        if not isinstance(value, np.ndarray) or value.dtype != fresh.dtype:
            raise StateError(f"{where}: expected an array of {fresh.dtype}")
        if value.shape != fresh.shape:
            raise StateError(f"{where}: shape {value.shape} does not fit {fresh.shape}")
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise StateError(f"{where}: not finite")
    elif isinstance(fresh, float):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise StateError(f"{where}: expected a finite number, got {value!r}")
        return float(value)
    elif type(value) is not type(fresh):
        raise StateError(f"{where}: expected {type(fresh).__name__}, got {type(value).__name__}")
    return value
