"""Arrays as plain data: bitwise, and small where they are mostly zero.

[dtype, shape, bytes]          zeros at the end are left out
[dtype, shape, bytes, mask]    rows that are all zero are left out; mask: a bit per row
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from .codec import StateError
from .declared import Array

ARRAY_ROWS_MAX = 1 << 24
ARRAY_BYTES_MAX = 1 << 29
_BITS = {1: np.uint8, 4: np.uint32, 8: np.uint64}


def packed(value: object) -> object:
    """What msgspec writes for a value that it does not know."""
    if isinstance(value, np.ndarray):
        return pack_array(value)
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} in a state")  # what msgspec asks of an enc_hook


def pack_array(value: NDArray[Any]) -> list[Any]:
    """An array as plain data."""
    head = [_name(value.dtype), list(value.shape)]
    if value.dtype.names is None and value.size:
        rows = np.ascontiguousarray(value)
        bits = rows.view(_BITS[rows.itemsize])
        used = bits != 0 if bits.ndim == 1 else np.logical_or.reduce(bits, axis=1)
        if np.count_nonzero(used) < len(used):
            return [*head, rows[used].tobytes(), np.packbits(used).tobytes()]
    return [*head, _without_zeros_at_end(value)]


def _without_zeros_at_end(value: NDArray[Any]) -> bytes:
    """Eight at a time, because a window of steps may end with a megabyte of them."""
    flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    words = flat[: len(flat) // 8 * 8].view(np.uint64)[::-1] != 0
    zeros = 0
    if words.size and not flat[8 * words.size :].any():
        first = int(words.argmax())
        zeros = len(flat) - 8 * (words.size - first) if words[first] else len(flat)
    return flat[: len(flat) - zeros].tobytes().rstrip(b"\0")


def array_of(value: Any, hint: Array) -> NDArray[Any]:
    """An array of any length, from plain data."""
    shape = value[1]
    if len(shape) != (1 if hint.columns is None else 2):
        raise StateError(f"array of shape {shape}")
    if hint.columns not in (None, -1) and shape[1] != hint.columns:
        raise StateError(f"array of shape {shape}, expected {hint.columns} columns")
    array = _unpack_array(value, hint.dtype)
    if not hint.nan and array.dtype.kind == "f" and not np.isfinite(array).all():
        raise StateError("not finite")
    return array


def array_like(value: Any, fresh: NDArray[Any]) -> NDArray[Any]:
    """An array of the dtype and shape of another one, from plain data."""
    if tuple(value[1]) != fresh.shape:
        raise StateError(f"array of shape {value[1]}, expected {list(fresh.shape)}")
    array = _unpack_array(value, fresh.dtype)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise StateError("not finite")
    return array


def _unpack_array(value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    name, shape, raw, *mask = cast("tuple[str, list[int], bytes, bytes]", value)
    if name != _name(dtype):
        raise StateError(f"array of {str(name)[:80]}, expected {_name(dtype)[:80]}")
    rows, row_bytes = shape[0], dtype.itemsize
    for n in shape[1:]:
        row_bytes *= n
    if min(shape) < 0 or rows > ARRAY_ROWS_MAX or rows * row_bytes > ARRAY_BYTES_MAX:
        raise StateError(f"array of shape {shape}")
    if not mask:
        if len(raw) > rows * row_bytes:
            raise StateError(f"{len(raw)} bytes for an array of {rows * row_bytes}")
        buffer = bytearray(rows * row_bytes)
        buffer[: len(raw)] = raw
        return np.frombuffer(buffer, dtype).reshape(shape)
    array = np.zeros(shape, dtype)
    used = np.unpackbits(np.frombuffer(mask[0], np.uint8), count=rows).view(np.bool_)
    array[used] = np.frombuffer(raw, dtype).reshape(int(used.sum()), *shape[1:])
    return array


def _name(dtype: np.dtype[Any]) -> str:
    return str(dtype.descr) if dtype.names else dtype.str


class Lease:
    """Somebody reads an object's arrays of ``Array(..., lent=True)`` where they are, until it is ``over``.

    The object's ``lend()`` makes it; whoever writes there meanwhile goes on with a copy.
    """

    __slots__ = ("over",)

    def __init__(self) -> None:
        self.over = False
